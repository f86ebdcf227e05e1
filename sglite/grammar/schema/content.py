"""Subschemas that say the same, found by content: they become one node, so what is proven of one holds for all.

Annotations (titles, descriptions, defaults, anything unknown) do not count. The order of keys does: it is
the order of the output's keys.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from sglite.grammar.schema.values import Json, identity

SCHEMA = frozenset(
    {
        "additionalProperties", "additionalItems", "contains", "propertyNames", "not", "if", "then", "else",
        "unevaluatedItems", "unevaluatedProperties",
    }
)  # fmt: skip
SCHEMAS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "dependentSchemas", "dependencies"})
PLAIN = frozenset(
    {
        "type", "enum", "const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
        "divisibleBy", "minLength", "maxLength", "pattern", "format",
        "minItems", "maxItems", "uniqueItems", "minContains", "maxContains",
        "minProperties", "maxProperties", "required", "dependentRequired", "$ref", "$dynamicRef", "$recursiveRef",
        "$id", "id", "$schema",
    }
)  # fmt: skip


class Contents:
    """`number` is the same for two subschemas with the same meaning (given the same base URI and draft)."""

    def __init__(self) -> None:
        self._by_place: dict[int, int] = {}
        self._by_content: dict[Hashable, int] = {}

    def number(self, value: Json) -> int:
        """`value` must live as long as this object: places are told apart by id()."""
        if not isinstance(value, dict):
            return self._of(("other", identity(value)))
        found = self._by_place.get(id(value))
        if found is None:
            content: list[Hashable] = []  # two a keyword
            for keyword, said in value.items():
                if keyword in _COUNTING:
                    content += (keyword, said if type(said) is str else self._said(keyword, said))
            found = self._by_place[id(value)] = self._of(tuple(content))
        return found

    def _of(self, content: Hashable) -> int:
        return self._by_content.setdefault(content, len(self._by_content))

    def _said(self, keyword: str, value: Json) -> Hashable:
        """What a keyword says, of subschemas their numbers."""
        if type(value) is dict:
            if keyword in NAMED_SCHEMAS:
                named: list[Hashable] = []
                for name, item in value.items():
                    named += (name, self.number(item))
                return tuple(named)
            if keyword in SCHEMA or keyword == "items":
                return self.number(value)
        elif keyword in SCHEMA:
            return self.number(value)
        elif type(value) is list and (keyword in SCHEMAS or keyword == "items"):
            return tuple([self.number(item) for item in value])
        return _text(value)


_COUNTING = PLAIN | SCHEMA | SCHEMAS | NAMED_SCHEMAS | {"items"}


def _text(value: Any) -> Hashable:
    """Data, with the order of its keys and the spelling of its numbers. Of a string it is the string."""
    if type(value) is str:
        return value
    if isinstance(value, list):
        return ("list", *map(_text, value))
    if isinstance(value, dict):
        return ("dict", *((name, _text(item)) for name, item in value.items()))
    return (type(value).__name__, str(value))
