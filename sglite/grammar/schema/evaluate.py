"""Whether a value satisfies a node: the plain meaning of the keywords, without any grammar.

Used to filter enums by what stands beside them, to validate in `on_unsupported="validate"`, and as the
reference that the tests hold the grammar against. Patterns are ECMA's, numbers are exact.
"""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any

import msgspec
from jsonschema import FormatChecker

from sglite.grammar.schema.document import Document, Draft, Node
from sglite.grammar.schema.formats import FORMAT_PATTERNS, IRREGULAR_FORMATS
from sglite.grammar.schema.pattern_text import found_in
from sglite.grammar.schema.values import Json, identity, is_integral, is_number, json_type

_CHECKER = FormatChecker()


class _Evaluated(msgspec.Struct):
    """What of one object or array some keyword has looked at (for unevaluated*)."""

    keys: set[str] = set()  # its own, as the next
    items: set[int] = set()

    def add(self, other: _Evaluated) -> None:
        self.keys |= other.keys
        self.items |= other.items


class Evaluator:
    def __init__(self, document: Document) -> None:
        self.document = document
        self._active: set[tuple[int, int]] = set()
        self._enums: dict[int, frozenset[object]] = {}

    def _enum(self, node: Node) -> frozenset[object]:
        if node.id not in self._enums:
            self._enums[node.id] = frozenset(identity(option) for option in node.keywords["enum"])
        return self._enums[node.id]

    def is_valid(self, node_id: int, value: Json) -> bool:
        return self.error(node_id, value) is None

    def error(self, node_id: int, value: Json, at: str = "") -> str | None:
        """The first violation as "<where in the value>: <what>", None where there is none."""
        return self._check(node_id, value, at, _Evaluated())

    def _check(self, node_id: int, value: Json, at: str, seen: _Evaluated) -> str | None:
        node = self.document.node(node_id)
        if isinstance(node.value, bool):
            return None if node.value else f"{at or '/'}: nothing is allowed here"
        place = (node_id, id(value))
        if place in self._active:
            return None
        self._active.add(place)
        try:
            return self._check_object(node, value, at, seen)
        finally:
            self._active.discard(place)

    def _check_object(self, node: Node, value: Json, at: str, seen: _Evaluated) -> str | None:
        keywords = node.keywords
        simple = self._simple(node, keywords, value)
        if simple:
            return f"{at or '/'}: {simple}"
        error = self._combined(node, keywords, value, at, seen)
        if error is None and isinstance(value, dict):
            error = self._object(node, keywords, value, at, seen)
        if error is None and isinstance(value, list):
            error = self._array(node, keywords, value, at, seen)
        return error

    def _simple(self, node: Node, keywords: dict[str, Json], value: Json) -> str | None:
        if "type" in keywords and not any(has_type(value, t, node.draft) for t in as_list(keywords["type"])):
            return f"is not of type {keywords['type']}"
        if "const" in keywords and identity(value) != identity(keywords["const"]):
            return "is not the constant"
        if "enum" in keywords and identity(value) not in self._enum(node):
            return "is not in the enum"
        if is_number(value):
            return _number_error(keywords, value)
        if isinstance(value, str):
            return _string_error(keywords, value)
        return None

    def _combined(self, node: Node, keywords: dict[str, Json], value: Json, at: str, seen: _Evaluated) -> str | None:
        for keyword in ("$ref", "$dynamicRef", "$recursiveRef"):
            if keyword in keywords:
                error = self._check(self.document.target(node, keyword), value, at, seen)
                if error:
                    return error
        for i in range(len(keywords.get("allOf", ()))):
            error = self._check(self.document.child(node, "allOf", i), value, at, seen)
            if error:
                return error
        for keyword in ("anyOf", "oneOf"):
            if keyword in keywords:
                error = self._some(node, keyword, value, at, seen)
                if error:
                    return error
        if "not" in keywords and self._holds(self.document.child(node, "not"), value, _Evaluated()):
            return f"{at or '/'}: satisfies what it must not (not)"
        return self._conditional(node, keywords, value, at, seen) if "if" in keywords else None

    def _some(self, node: Node, keyword: str, value: Json, at: str, seen: _Evaluated) -> str | None:
        assert isinstance(node.value, dict)
        matched, errors = 0, []
        for i in range(len(node.value[keyword])):
            inner = _Evaluated()
            error = self._check(self.document.child(node, keyword, i), value, at, inner)
            if error is None:
                matched += 1
                seen.add(inner)
            else:
                errors.append(error)
        if matched == 0:
            return f"{at or '/'}: fits no branch of {keyword} ({'; '.join(errors[:3])})"
        if keyword == "oneOf" and matched > 1:
            return f"{at or '/'}: fits {matched} branches of oneOf"
        return None

    def _conditional(self, node: Node, keywords: dict[str, Json], value: Json, at: str, seen: _Evaluated) -> str | None:
        inner = _Evaluated()
        holds = self._holds(self.document.child(node, "if"), value, inner)
        if holds:
            seen.add(inner)
        branch = "then" if holds else "else"
        return self._check(self.document.child(node, branch), value, at, seen) if branch in keywords else None

    def _holds(self, node_id: int, value: Json, seen: _Evaluated) -> bool:
        return self._check(node_id, value, "", seen) is None

    def _object(
        self, node: Node, keywords: dict[str, Json], value: dict[str, Json], at: str, seen: _Evaluated
    ) -> str | None:
        required = keywords.get("required", ())
        for name in required if isinstance(required, list) else ():
            if name not in value:
                return f"{at or '/'}: the key {name!r} is missing"
        if len(value) < keywords.get("minProperties", 0):
            return f"{at or '/'}: has fewer than {keywords['minProperties']} keys"
        if len(value) > keywords.get("maxProperties", len(value)):
            return f"{at or '/'}: has more than {keywords['maxProperties']} keys"
        for name, item in value.items():
            for child in self._children_of(node, keywords, name):
                seen.keys.add(name)
                error = self._check(child, item, f"{at}/{name}", _Evaluated())
                if error:
                    return error
            if "propertyNames" in keywords:
                error = self._check(self.document.child(node, "propertyNames"), name, f"{at}/{name}", _Evaluated())
                if error:
                    return f"{error} (its name)"
        error = self._dependencies(node, keywords, value, at, seen)
        if error is None and "unevaluatedProperties" in keywords:
            child = self.document.child(node, "unevaluatedProperties")
            for name in value.keys() - seen.keys:
                error = error or self._check(child, value[name], f"{at}/{name}", _Evaluated())
            seen.keys.update(value)
        return error

    def _children_of(self, node: Node, keywords: dict[str, Json], name: str) -> list[int]:
        found = []
        if name in keywords.get("properties", {}):
            found.append(self.document.child(node, "properties", name))
        for pattern in keywords.get("patternProperties", {}):
            if found_in(pattern, name):
                found.append(self.document.child(node, "patternProperties", pattern))
        if not found and "additionalProperties" in keywords:
            found.append(self.document.child(node, "additionalProperties"))
        return found

    def _dependencies(
        self, node: Node, keywords: dict[str, Json], value: dict[str, Json], at: str, seen: _Evaluated
    ) -> str | None:
        for keyword in ("dependencies", "dependentRequired", "dependentSchemas"):
            for name, wanted in keywords.get(keyword, {}).items():
                if name not in value:
                    continue
                if isinstance(wanted, list | str):
                    missing = [other for other in as_list(wanted) if other not in value]
                    if missing:
                        return f"{at or '/'}: with the key {name!r} there must be {missing[0]!r}"
                    continue
                error = self._check(self.document.child(node, keyword, name), value, at, seen)
                if error:
                    return error
        return None

    def _array(self, node: Node, keywords: dict[str, Json], value: list[Json], at: str, seen: _Evaluated) -> str | None:
        if len(value) < keywords.get("minItems", 0):
            return f"{at or '/'}: has fewer than {keywords['minItems']} items"
        if len(value) > keywords.get("maxItems", len(value)):
            return f"{at or '/'}: has more than {keywords['maxItems']} items"
        if keywords.get("uniqueItems") is True and len({identity(item) for item in value}) < len(value):
            return f"{at or '/'}: holds an item twice"
        prefix, rest = item_nodes(self.document, node)
        for i, item in enumerate(value):
            child = prefix[i] if i < len(prefix) else rest
            if child is not None:
                seen.items.add(i)
                error = self._check(child, item, f"{at}/{i}", _Evaluated())
                if error:
                    return error
        if "contains" in keywords:
            child = self.document.child(node, "contains")
            hits = {i for i, item in enumerate(value) if self._holds(child, item, _Evaluated())}
            seen.items |= hits
            if not keywords.get("minContains", 1) <= len(hits) <= keywords.get("maxContains", len(value)):
                return f"{at or '/'}: contains {len(hits)} matching items"
        if "unevaluatedItems" in keywords:
            child = self.document.child(node, "unevaluatedItems")
            for i in set(range(len(value))) - seen.items:
                error = self._check(child, value[i], f"{at}/{i}", _Evaluated())
                if error:
                    return error
            seen.items.update(range(len(value)))
        return None


def item_nodes(document: Document, node: Node) -> tuple[list[int], int | None]:
    """The nodes of the first items, and the node of all further ones (None: anything)."""
    keywords = node.keywords
    if isinstance(keywords.get("items"), list) and node.draft != Draft.D2020:
        prefix = [document.child(node, "items", i) for i in range(len(keywords["items"]))]
        rest = document.child(node, "additionalItems") if "additionalItems" in keywords else None
        return prefix, rest
    prefix = [document.child(node, "prefixItems", i) for i in range(len(keywords.get("prefixItems", ())))]
    return prefix, document.child(node, "items") if "items" in keywords else None


def as_list(value: Json) -> list[Any]:
    return value if isinstance(value, list) else [value]


def has_type(value: Json, name: str, draft: Draft) -> bool:
    if name == "integer":
        # Draft 4 goes by the spelling: 1.0 is no integer there.
        return is_number(value) and (isinstance(value, int) if draft == Draft.D4 else is_integral(value))
    return json_type(value) == name or name == "any"


def number_bounds(keywords: dict[str, Json]) -> list[tuple[str, Any, bool]]:
    """(keyword, bound, whether the bound itself is out) of the range keywords, draft 4's booleans included."""
    found = []
    for plain, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if is_number(keywords.get(plain)):
            found.append((plain, keywords[plain], keywords.get(exclusive) is True))
        if is_number(keywords.get(exclusive)):
            found.append((exclusive, keywords[exclusive], True))
    return found


def _number_error(keywords: dict[str, Json], value: int | Decimal) -> str | None:
    for keyword, bound, open_end in number_bounds(keywords):
        below = "inimum" in keyword
        if (value < bound if below else value > bound) or (open_end and value == bound):
            return f"is outside of {keyword} {bound}"
    divisor = keywords.get("multipleOf", keywords.get("divisibleBy"))
    if is_number(divisor) and divisor and not is_multiple(value, divisor):
        return f"is not a multiple of {divisor}"
    return None


def is_multiple(value: int | Decimal, divisor: int | Decimal) -> bool:
    return Fraction(value) % Fraction(divisor) == 0  # Decimal's own arithmetic rounds to 28 digits


def _string_error(keywords: dict[str, Json], value: str) -> str | None:
    if len(value) < keywords.get("minLength", 0):
        return f"is shorter than {keywords['minLength']}"
    if len(value) > keywords.get("maxLength", len(value)):
        return f"is longer than {keywords['maxLength']}"
    if isinstance(keywords.get("pattern"), str) and not found_in(keywords["pattern"], value):
        return f"does not match {keywords['pattern']!r}"
    if isinstance(keywords.get("format"), str) and not format_holds(keywords["format"], value):
        return f"is no {keywords['format']}"
    return None


def format_holds(name: str, value: str) -> bool:
    if name in FORMAT_PATTERNS:
        return found_in(FORMAT_PATTERNS[name], value)
    return name not in IRREGULAR_FORMATS or _CHECKER.conforms(value, name)
