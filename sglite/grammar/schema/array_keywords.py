"""Keywords about arrays."""

from __future__ import annotations

from collections.abc import Callable

from sglite.grammar.schema.cases import (
    ALL_TYPES,
    ARRAY,
    Case,
    Contains,
    ItemRule,
    Rank,
)
from sglite.grammar.schema.document import Document, Node
from sglite.grammar.schema.evaluate import item_nodes
from sglite.grammar.schema.steps import Option, Step, Term, count, expect, only


def _items(document: Document, node: Node) -> list[Term]:
    prefix, rest = item_nodes(document, node)
    rule = ItemRule(tuple(prefix), rest)

    def run(case: Case, _: Rank) -> None:
        if rule not in case.items:
            case.items += (rule,)

    return [Step(run)]


def _not_items(document: Document, node: Node) -> list[Option]:
    prefix, rest = item_nodes(document, node)
    options: list[Option] = []
    for i, child in enumerate(prefix):
        rule = ItemRule((*[None] * i, ~child), None)
        options.append((only(ARRAY), Step(_with_item(i + 1, rule))))
    if rest is not None:
        wrong = Contains(~rest, 1, None, len(prefix))
        options.append((only(ARRAY), Step(_with_contains(wrong))))
    return options


def _with_item(least: int, rule: ItemRule) -> Callable[[Case, Rank], None]:
    def run(case: Case, _: Rank) -> None:
        case.items += (rule,)
        case.limit_items(least, None)

    return run


def _with_contains(rule: Contains) -> Callable[[Case, Rank], None]:
    def run(case: Case, _: Rank) -> None:
        if rule not in case.contains:
            case.contains += (rule,)
        case.limit_items(rule.start + rule.least, None)

    return run


def _contains_range(node: Node) -> tuple[int, int | None]:
    words = node.keywords
    least = count(node, "minContains") if "minContains" in words else 1
    return least, count(node, "maxContains") if "maxContains" in words else None


def _contains(document: Document, node: Node) -> list[Term]:
    least, most = _contains_range(node)
    if most is not None and most < least:
        return [only(ALL_TYPES & ~ARRAY)]
    if least == 0 and most is None:
        return []
    return [Step(_with_contains(Contains(document.child(node, "contains"), least, most)))]


def _not_contains(document: Document, node: Node) -> list[Option]:
    least, most = _contains_range(node)
    child = document.child(node, "contains")
    options: list[Option] = []
    if least:
        options.append((only(ARRAY), Step(_with_contains(Contains(child, 0, least - 1)))))
    if most is not None:
        options.append((only(ARRAY), Step(_with_contains(Contains(child, most + 1, None)))))
    return options


def _item_count(document: Document, node: Node) -> list[Term]:
    words = node.keywords
    low = count(node, "minItems") if "minItems" in words else 0
    high = count(node, "maxItems") if "maxItems" in words else None
    return [Step(lambda case, _: case.limit_items(low, high))]


def _not_item_count(keyword: str) -> Callable[[Document, Node], list[Option]]:
    def options(document: Document, node: Node) -> list[Option]:
        limit = count(node, keyword)
        if keyword == "minItems":
            return [(only(ARRAY), Step(lambda case, _: case.limit_items(0, limit - 1)))] if limit else []
        return [(only(ARRAY), Step(lambda case, _: case.limit_items(limit + 1, None)))]

    return options


def _unique(document: Document, node: Node) -> list[Term]:
    if expect(node, "uniqueItems", bool) is not True:
        return []
    return [Step(lambda case, _: case.be_unique(node.id, f"{node.pointer}/uniqueItems"))]


def _not_unique(document: Document, node: Node) -> list[Option]:
    if node.keywords["uniqueItems"] is not True:
        return []

    def run(case: Case, _: Rank) -> None:
        case.repeated = case.repeated or (node.id, f"{node.pointer}/uniqueItems")
        case.limit_items(2, None)
        if case.unique is not None:
            case.narrow(~ARRAY)

    return [(only(ARRAY), Step(run))]


ASSERTED: dict[str, Callable[[Document, Node], list[Term]]] = {
    **dict.fromkeys(("items", "prefixItems"), _items),
    "contains": _contains,
    **dict.fromkeys(("minItems", "maxItems"), _item_count),
    "uniqueItems": _unique,
}

DENIED: dict[str, Callable[[Document, Node], list[Option]]] = {
    "items": _not_items,
    "prefixItems": lambda document, node: [] if "items" in node.keywords else _not_items(document, node),
    "contains": _not_contains,
    **{k: _not_item_count(k) for k in ("minItems", "maxItems")},
    "uniqueItems": _not_unique,
}
