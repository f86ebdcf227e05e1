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
            content = tuple([self._member(k, v) for k, v in value.items() if k in _COUNTING])
            found = self._by_place[id(value)] = self._of(content)
        return found

    def _of(self, content: Hashable) -> int:
        return self._by_content.setdefault(content, len(self._by_content))

    def _member(self, keyword: str, value: Json) -> Hashable:
        if type(value) is str:
            return keyword, value
        if keyword in SCHEMA or (keyword == "items" and isinstance(value, dict)):
            return keyword, self.number(value)
        if (keyword in SCHEMAS or keyword == "items") and isinstance(value, list):
            return keyword, tuple(self.number(item) for item in value)
        if keyword in NAMED_SCHEMAS and isinstance(value, dict):
            return keyword, tuple([(name, self.number(item)) for name, item in value.items()])
        return keyword, _text(value)


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
