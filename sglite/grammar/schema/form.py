"""Whether the keywords of a subschema have values of the kind that they must have."""

from __future__ import annotations

from collections.abc import Callable

from sglite.errors import InvalidGrammar
from sglite.grammar.schema.document import Node
from sglite.grammar.schema.values import Json, is_number

Check = tuple[Callable[[Json], bool], str]


def _is_count(value: Json) -> bool:
    return is_number(value) and value >= 0 and value == int(value)


def _are_texts(value: Json) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_dependency(value: Json) -> bool:
    return isinstance(value, dict | bool | str) or _are_texts(value)


_NUMBER: Check = is_number, "must be a number"
_BOUND: Check = (lambda value: is_number(value) or isinstance(value, bool)), "must be a number"
_COUNT: Check = _is_count, "must be a whole number, not negative"
_DIVISOR: Check = (lambda value: is_number(value) and value > 0), "must be a number above 0"
_TEXT: Check = (lambda value: isinstance(value, str)), "must be a string"
_LIST: Check = (lambda value: isinstance(value, list)), "must be an array"
_OBJECT: Check = (lambda value: isinstance(value, dict)), "must be an object"
_BOOLEAN: Check = (lambda value: isinstance(value, bool)), "must be true or false"
_REQUIRED: Check = (lambda value: isinstance(value, bool) or _are_texts(value)), "must be an array of strings"
_LISTS: Check = (
    (lambda value: isinstance(value, dict) and all(map(_are_texts, value.values()))),
    "must be an object of arrays of strings",
)
_SCHEMAS: Check = (
    (lambda value: isinstance(value, dict) and all(isinstance(item, dict | bool) for item in value.values())),
    "must be an object of schemas",
)
_DEPENDENCIES: Check = (
    (lambda value: isinstance(value, dict) and all(map(_is_dependency, value.values()))),
    "must be an object of schemas or arrays of strings",
)

CHECKS: dict[str, Check] = {
    **dict.fromkeys(("minimum", "maximum"), _NUMBER),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), _BOUND),
    **dict.fromkeys(("multipleOf", "divisibleBy"), _DIVISOR),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), _COUNT),
    **dict.fromkeys(("minContains", "maxContains"), _COUNT),
    **dict.fromkeys(("pattern", "format", "$ref", "$dynamicRef", "$recursiveRef"), _TEXT),
    **dict.fromkeys(("enum", "prefixItems", "allOf", "anyOf", "oneOf"), _LIST),
    **dict.fromkeys(("properties", "patternProperties"), _OBJECT),
    "dependentSchemas": _SCHEMAS,
    "uniqueItems": _BOOLEAN,
    "required": _REQUIRED,
    "dependentRequired": _LISTS,
    "dependencies": _DEPENDENCIES,
}


def check_form(node: Node) -> None:
    """Raises InvalidGrammar with the pointer of the first keyword that is malformed."""
    for keyword, value in node.keywords.items():
        check = CHECKS.get(keyword)
        if check is not None and not check[0](value):
            raise InvalidGrammar(
                f"{keyword} at {node.pointer or '/'} {check[1]}", pointer=f"{node.pointer}/{keyword}", keyword=keyword
            )
