"""Keywords about objects."""

from __future__ import annotations

from collections.abc import Callable

from sglite.grammar.schema.cases import (
    OBJECT,
    Case,
    KeyRule,
    Rank,
    SomeKey,
)
from sglite.grammar.schema.document import Document, Node
from sglite.grammar.schema.pattern import PatternError
from sglite.grammar.schema.pattern_text import pattern_expression
from sglite.grammar.schema.steps import Option, Step, Term, count, expect, gap, only

KEY_KEYWORDS = frozenset({"properties", "patternProperties", "additionalProperties"})


def _keys(document: Document, node: Node) -> list[Term]:
    named, patterns, rest = key_nodes(document, node)
    pattern = ""
    try:
        for pattern in patterns:
            pattern_expression(pattern)
    except PatternError as error:
        return [gap(node, "patternProperties", f"the pattern {pattern!r}: {error}", OBJECT)]

    def run(case: Case, rank: Rank) -> None:
        case.keys += (KeyRule(rank, named, tuple(patterns.items()), rest),)

    return [Step(run)]


def key_nodes(document: Document, node: Node) -> tuple[dict[str, int], dict[str, int], int | None]:
    words = node.keywords
    named = document.children(node, "properties", expect(node, "properties", dict)) if "properties" in words else {}
    texts = expect(node, "patternProperties", dict) if "patternProperties" in words else ()
    patterns = {p: document.child(node, "patternProperties", p) for p in texts}
    rest = document.child(node, "additionalProperties") if "additionalProperties" in words else None
    return named, patterns, rest


def _not_properties(document: Document, node: Node) -> list[Option]:
    named, _, _ = key_nodes(document, node)

    def option(name: str, child: int) -> Option:
        def run(case: Case, rank: Rank) -> None:
            case.keys += (KeyRule(rank, {name: ~child}, (), None),)
            case.require(name)

        return (only(OBJECT), Step(run))

    return [option(name, child) for name, child in named.items()]


def _some_key(rule: SomeKey) -> Option:
    def run(case: Case, _: Rank) -> None:
        if rule not in case.some_keys:
            case.some_keys += (rule,)
        case.limit_keys(1, None)

    return (only(OBJECT), Step(run))


def _not_pattern_properties(document: Document, node: Node) -> list[Option]:
    _, patterns, _ = key_nodes(document, node)
    return [_some_key(SomeKey(pattern=pattern, value=~child)) for pattern, child in patterns.items()]


def _not_additional(document: Document, node: Node) -> list[Option]:
    named, patterns, rest = key_nodes(document, node)
    assert rest is not None
    if document.node(rest).value is True:
        return []
    return [_some_key(SomeKey(named=frozenset(named), not_matching=tuple(patterns), value=~rest))]


def _names(document: Document, node: Node) -> list[Term]:
    child = document.child(node, "propertyNames")

    def run(case: Case, _: Rank) -> None:
        if child not in case.key_names:
            case.key_names += (child,)

    return [Step(run)]


def _not_names(document: Document, node: Node) -> list[Option]:
    return [_some_key(SomeKey(name=~document.child(node, "propertyNames")))]


def _required(document: Document, node: Node) -> list[Term]:
    value = node.keywords["required"]
    if isinstance(value, bool):  # draft 3 marked the property itself; since draft 4 it says nothing
        return []
    names = expect(node, "required", list)

    def run(case: Case, _: Rank) -> None:
        for name in names:
            case.require(name)

    return [Step(run)]


def _not_required(document: Document, node: Node) -> list[Option]:
    value = node.keywords["required"]
    names = [] if isinstance(value, bool) else value
    return [(only(OBJECT), Step(lambda case, _, n=name: case.forbid(n))) for name in names]


def _key_count(document: Document, node: Node) -> list[Term]:
    words = node.keywords
    low = count(node, "minProperties") if "minProperties" in words else 0
    high = count(node, "maxProperties") if "maxProperties" in words else None
    return [Step(lambda case, _: case.limit_keys(low, high))]


def _not_key_count(keyword: str) -> Callable[[Document, Node], list[Option]]:
    def options(document: Document, node: Node) -> list[Option]:
        limit = count(node, keyword)
        if keyword == "minProperties":
            return [(only(OBJECT), Step(lambda case, _: case.limit_keys(0, limit - 1)))] if limit else []
        return [(only(OBJECT), Step(lambda case, _: case.limit_keys(limit + 1, None)))]

    return options


ASSERTED: dict[str, Callable[[Document, Node], list[Term]]] = {
    **dict.fromkeys(KEY_KEYWORDS, _keys),
    "propertyNames": _names,
    "required": _required,
    **dict.fromkeys(("minProperties", "maxProperties"), _key_count),
}

DENIED: dict[str, Callable[[Document, Node], list[Option]]] = {
    "properties": _not_properties,
    "patternProperties": _not_pattern_properties,
    "additionalProperties": _not_additional,
    "propertyNames": _not_names,
    "required": _not_required,
    **{k: _not_key_count(k) for k in ("minProperties", "maxProperties")},
}
