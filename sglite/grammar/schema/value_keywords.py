"""Keywords about any value, about numbers and about strings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglite.grammar.schema.cases import (
    ALL_TYPES,
    NUMBER,
    STRING,
    TYPE_BITS,
    Bound,
    Case,
    Rank,
    TextRule,
)
from sglite.grammar.schema.document import Document, Node
from sglite.grammar.schema.evaluate import as_list, number_bounds
from sglite.grammar.schema.formats import FORMAT_PATTERNS, IRREGULAR_FORMATS, NARROWED_FORMATS
from sglite.grammar.schema.pattern import PatternError
from sglite.grammar.schema.pattern_text import pattern_expression
from sglite.grammar.schema.steps import Holds, Option, Step, Term, count, expect, gap, misused, only
from sglite.grammar.schema.values import Json, is_number

_RANGE = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_DIVISORS = ("multipleOf", "divisibleBy")
_TEXTS = ("pattern", "format")


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


ASSERTED: dict[str, Callable[[Document, Node], list[Term]]] = {
    "type": _type,
    **{k: _values(k) for k in ("enum", "const")},
    **{k: _bounds(k) for k in _RANGE},
    **{k: _multiple(k) for k in _DIVISORS},
    **dict.fromkeys(("minLength", "maxLength"), _length),
    **{k: _text(k) for k in _TEXTS},
}

DENIED: dict[str, Callable[[Document, Node], list[Option]]] = {
    "type": _not_type,
    **{k: _other_values(k) for k in ("enum", "const")},
    **{k: _outside_bounds(k) for k in _RANGE},
    **{k: _not_multiple(k) for k in _DIVISORS},
    **{k: _not_length(k) for k in ("minLength", "maxLength")},
    **{k: _not_text(k) for k in _TEXTS},
}
