"""The keywords about one type each: what narrows a case when they hold, and how they can be violated.

ASSERTED: keyword -> (document, node) -> terms. DENIED: keyword -> (document, node) -> options, each of which
violates the keyword.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import msgspec

from sglite.errors import InvalidGrammar
from sglite.grammar.schema.cases import (
    ALL_TYPES,
    ARRAY,
    NUMBER,
    OBJECT,
    STRING,
    TYPE_BITS,
    Bound,
    Case,
    Contains,
    Gap,
    ItemRule,
    KeyRule,
    Literal,
    Rank,
    SomeKey,
    TextRule,
    Unlooked,
)
from sglite.grammar.schema.document import Document, Node
from sglite.grammar.schema.evaluate import as_list, item_nodes, number_bounds
from sglite.grammar.schema.formats import FORMAT_PATTERNS, IRREGULAR_FORMATS, NARROWED_FORMATS
from sglite.grammar.schema.pattern import PatternError
from sglite.grammar.schema.pattern_text import pattern_expression
from sglite.grammar.schema.values import Json, is_number

KEY_KEYWORDS = frozenset({"properties", "patternProperties", "additionalProperties"})


class Holds(msgspec.Struct, frozen=True):
    literal: Literal


class Step(msgspec.Struct, frozen=True):
    run: Callable[[Case, Rank], None]


class Choice(msgspec.Struct, frozen=True):
    """At least one option holds. `node_id` and `keyword`: who asked for it."""

    options: tuple[Option, ...]
    node_id: int
    pointer: str
    keyword: str


Term = Holds | Step | Choice
Option = tuple[Term, ...]


def expect(node: Node, keyword: str, kind: type) -> Any:
    """The keyword's value. Raises InvalidGrammar where it is of another kind."""
    value = node.keywords[keyword]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        words = {dict: "an object", list: "an array", str: "a string", int: "a whole number", bool: "true or false"}
        raise misused(node, keyword, f"must be {words[kind]}")
    return value


def misused(node: Node, keyword: str, what: str) -> InvalidGrammar:
    """The error for a keyword whose value is none that it can have."""
    return InvalidGrammar(
        f"{keyword} at {node.pointer or '/'} {what}", pointer=f"{node.pointer}/{keyword}", keyword=keyword
    )


def count(node: Node, keyword: str) -> int:
    value = node.keywords[keyword]
    if not is_number(value) or value != int(value) or value < 0:
        raise misused(node, keyword, "must be a whole number, not negative")
    return int(value)


@lru_cache(maxsize=256)
def only(mask: int) -> Step:
    return Step(lambda case, _: case.narrow(mask))


def gap(node: Node, keyword: str, reason: str, mask: int) -> Step:
    found = Gap(mask, node.id, f"{node.pointer}/{keyword}", keyword, reason)
    return Step(lambda case, _: case.add_gap(found))


# --- any type


def _type_mask(node: Node) -> int:
    said = node.keywords["type"]
    if type(said) is str and said in TYPE_BITS:
        return TYPE_BITS[said]
    mask = 0
    for name in as_list(said):
        if not isinstance(name, str) or name not in TYPE_BITS:
            known = ", ".join(each for each in TYPE_BITS if each != "any")
            raise misused(node, "type", f"knows no {name!r}; the types are {known}")
        mask |= TYPE_BITS[name]
    return mask


def _type(document: Document, node: Node) -> list[Term]:
    return [only(_type_mask(node))]


def _not_type(document: Document, node: Node) -> list[Option]:
    return [(only(ALL_TYPES & ~_type_mask(node)),)]


def _options(node: Node, keyword: str) -> tuple[Json, ...]:
    return tuple(expect(node, "enum", list)) if keyword == "enum" else (node.keywords["const"],)


def _values(keyword: str) -> Callable[[Document, Node], list[Term]]:
    def terms(document: Document, node: Node) -> list[Term]:
        options = _options(node, keyword)
        return [Step(lambda case, _: case.limit_to(options))]

    return terms


def _other_values(keyword: str) -> Callable[[Document, Node], list[Option]]:
    def options(document: Document, node: Node) -> list[Option]:
        values = _options(node, keyword)
        plain = tuple(value for value in values if not isinstance(value, dict | list))
        nested = [Holds(~document.synthetic(_shape(value), node)) for value in values if isinstance(value, dict | list)]

        def exclude(case: Case, _: Rank) -> None:
            case.not_values += plain
            if case.values is not None:
                case.limit_to(case.values)

        return [(Step(exclude), *nested)]

    return options


def _shape(value: Json) -> dict[str, Json]:
    """A schema of keywords for one constant array or object."""
    if isinstance(value, list):
        prefix = [{"const": item} for item in value]
        return {"type": "array", "minItems": len(value), "maxItems": len(value), "prefixItems": prefix}
    properties = {name: {"const": item} for name, item in value.items()}
    return {"type": "object", "properties": properties, "required": list(value), "additionalProperties": False}


# --- numbers


def _bounds(keyword: str) -> Callable[[Document, Node], list[Term]]:
    def terms(document: Document, node: Node) -> list[Term]:
        found = [(bound, is_open) for name, bound, is_open in number_bounds(node.keywords) if name == keyword]
        below = "inimum" in keyword
        return [
            Step(lambda case, _, b=Bound(bound, is_open): case.raise_low(b) if below else case.lower_high(b))
            for bound, is_open in found
        ]

    return terms


def _outside_bounds(keyword: str) -> Callable[[Document, Node], list[Option]]:
    def options(document: Document, node: Node) -> list[Option]:
        found = [(bound, is_open) for name, bound, is_open in number_bounds(node.keywords) if name == keyword]
        below = "inimum" in keyword
        return [
            (
                only(NUMBER),
                Step(lambda case, _, b=Bound(bound, not is_open): case.lower_high(b) if below else case.raise_low(b)),
            )
            for bound, is_open in found
        ]

    return options


def _divisor(node: Node, keyword: str) -> Any:
    value = node.keywords[keyword]
    if not is_number(value) or value <= 0:
        raise misused(node, keyword, "must be a number above 0")
    return value


def _multiple(keyword: str) -> Callable[[Document, Node], list[Term]]:
    def terms(document: Document, node: Node) -> list[Term]:
        divisor = _divisor(node, keyword)

        def run(case: Case, _: Rank) -> None:
            case.multiples += (divisor,)

        return [Step(run)]

    return terms


def _not_multiple(keyword: str) -> Callable[[Document, Node], list[Option]]:
    def options(document: Document, node: Node) -> list[Option]:
        divisor = _divisor(node, keyword)

        def run(case: Case, _: Rank) -> None:
            case.not_multiples += (divisor,)

        return [(only(NUMBER), Step(run))]

    return options


# --- strings


def _length(document: Document, node: Node) -> list[Term]:
    words = node.keywords
    low = count(node, "minLength") if "minLength" in words else 0
    high = count(node, "maxLength") if "maxLength" in words else None
    return [Step(lambda case, _: case.limit_length(low, high))]


def _not_length(keyword: str) -> Callable[[Document, Node], list[Option]]:
    def options(document: Document, node: Node) -> list[Option]:
        limit = count(node, keyword)
        if keyword == "minLength":
            return [(only(STRING), Step(lambda case, _: case.limit_length(0, limit - 1)))] if limit else []
        return [(only(STRING), Step(lambda case, _: case.limit_length(limit + 1, None)))]

    return options


def _text_rule(node: Node, keyword: str, *, negated: bool) -> Step | None:
    """None: an annotation."""
    text = node.keywords[keyword]
    if not isinstance(text, str):
        raise misused(node, keyword, "must be a string")
    if keyword == "format":
        is_narrowed = text in NARROWED_FORMATS and not negated
        if text in IRREGULAR_FORMATS and not is_narrowed:
            return gap(node, keyword, f"no regular language holds the format {text!r}", STRING)
        if text not in FORMAT_PATTERNS and not is_narrowed:
            return None
    else:
        try:
            pattern_expression(text)
        except PatternError as error:
            return gap(node, keyword, f"the pattern {text!r}: {error}", STRING)
    rule = TextRule(keyword, text, negated)

    def run(case: Case, _: Rank) -> None:
        if rule not in case.texts:
            case.texts += (rule,)
        if TextRule(keyword, text, not negated) in case.texts:
            case.narrow(~STRING)

    return Step(run)


def _text(keyword: str) -> Callable[[Document, Node], list[Term]]:
    def terms(document: Document, node: Node) -> list[Term]:
        step = _text_rule(node, keyword, negated=False)
        return [] if step is None else [step]

    return terms


def _not_text(keyword: str) -> Callable[[Document, Node], list[Option]]:
    def options(document: Document, node: Node) -> list[Option]:
        step = _text_rule(node, keyword, negated=True)
        return [] if step is None else [(only(STRING), step)]

    return options


# --- arrays


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


def _unevaluated(keyword: str) -> Callable[[Document, Node], list[Term]]:
    def terms(document: Document, node: Node) -> list[Term]:
        if node.keywords[keyword] is True:
            return []
        pointer, child = f"{node.pointer}/{keyword}", document.child(node, keyword)

        def run(case: Case, rank: Rank) -> None:
            case.unlooked += (Unlooked(node.id, pointer, keyword, child, rank),)

        return [Step(run)]

    return terms


def _not_unevaluated(keyword: str, mask: int) -> Callable[[Document, Node], list[Option]]:
    def options(document: Document, node: Node) -> list[Option]:
        if node.keywords[keyword] is True:
            return []
        return [(only(mask), gap(node, keyword, "it depends on what other keywords have looked at", mask))]

    return options


# --- objects


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


_RANGE = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_DIVISORS = ("multipleOf", "divisibleBy")
_TEXTS = ("pattern", "format")
_UNEVALUATED = {"unevaluatedItems": ARRAY, "unevaluatedProperties": OBJECT}

ASSERTED: dict[str, Callable[[Document, Node], list[Term]]] = {
    "type": _type,
    **{k: _values(k) for k in ("enum", "const")},
    **{k: _bounds(k) for k in _RANGE},
    **{k: _multiple(k) for k in _DIVISORS},
    **dict.fromkeys(("minLength", "maxLength"), _length),
    **{k: _text(k) for k in _TEXTS},
    **dict.fromkeys(("items", "prefixItems"), _items),
    "contains": _contains,
    **dict.fromkeys(("minItems", "maxItems"), _item_count),
    "uniqueItems": _unique,
    **dict.fromkeys(KEY_KEYWORDS, _keys),
    "propertyNames": _names,
    "required": _required,
    **dict.fromkeys(("minProperties", "maxProperties"), _key_count),
    **{k: _unevaluated(k) for k in _UNEVALUATED},
}

DENIED: dict[str, Callable[[Document, Node], list[Option]]] = {
    "type": _not_type,
    **{k: _other_values(k) for k in ("enum", "const")},
    **{k: _outside_bounds(k) for k in _RANGE},
    **{k: _not_multiple(k) for k in _DIVISORS},
    **{k: _not_length(k) for k in ("minLength", "maxLength")},
    **{k: _not_text(k) for k in _TEXTS},
    "items": _not_items,
    "prefixItems": lambda document, node: [] if "items" in node.keywords else _not_items(document, node),
    "contains": _not_contains,
    **{k: _not_item_count(k) for k in ("minItems", "maxItems")},
    "uniqueItems": _not_unique,
    "properties": _not_properties,
    "patternProperties": _not_pattern_properties,
    "additionalProperties": _not_additional,
    "propertyNames": _not_names,
    "required": _not_required,
    **{k: _not_key_count(k) for k in ("minProperties", "maxProperties")},
    **{k: _not_unevaluated(k, mask) for k, mask in _UNEVALUATED.items()},
}
