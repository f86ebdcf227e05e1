"""JSON text to Python values without losing a digit, and what "equal" means between them.

Numbers are int where the text has neither fraction nor exponent, Decimal otherwise. 1, 1.0 and 1e0 are
equal, true is not 1.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable
from decimal import Context, Decimal
from json.encoder import encode_basestring
from typing import Any

from sglite.errors import GrammarTooLarge, InvalidGrammar
from sglite.grammar.schema.types import SchemaLimits

Json = Any
_QUOTED_BLANKS = ('" ', '"\t', '"\n', '"\r')
_BLANK_BEFORE_COLON = re.compile(r'"[ \t\n\r]+:')
_EXACT = Context(prec=10_000)  # the default rounds to 28 digits


def parse_schema_text(source: str, limits: SchemaLimits) -> Json:
    """The value of a schema's text. Raises InvalidGrammar or GrammarTooLarge."""
    if len(source) > limits.max_bytes:
        raise GrammarTooLarge(f"the schema has {len(source)} characters, more than {limits.max_bytes}")
    value = _parse(source, limits.max_number_digits, None)  # deep nesting ends in a RecursionError
    num_keys = _check_size(value, limits)
    if _num_written_keys(source) != num_keys:
        value = parse_json(source, max_digits=limits.max_number_digits)  # surely sees a key that stands twice
    return value


def _num_written_keys(text: str) -> int | None:
    """How many keys a JSON text has, those that stand twice with them. None: not easily told."""
    if '\\\\"' in text or (any(blank in text for blank in _QUOTED_BLANKS) and _BLANK_BEFORE_COLON.search(text)):
        return None
    return text.count('":') - text.count('\\":')


def parse_json(text: str, *, max_digits: int = 4000) -> Json:
    """Strict JSON: no NaN, no key twice, no number that would be dear to compute with."""
    return _parse(text, max_digits, _unique_keys)


def _parse(text: str, max_digits: int, make: Callable[[list[tuple[str, Json]]], Json] | None) -> Json:
    """`make`: an object's value of its members; None: a dict, where the last of equal keys wins."""

    def integer(digits: str) -> int:
        if len(digits) > max_digits:
            raise GrammarTooLarge(f"a number has {len(digits)} digits, more than {max_digits}")
        return int(digits)

    def decimal(digits: str) -> Decimal:
        value = Decimal(digits)
        exponent = value.as_tuple().exponent
        if len(digits) > max_digits or not isinstance(exponent, int) or abs(exponent) > max_digits:
            raise GrammarTooLarge(f"the number {digits[:40]} is longer than {max_digits} digits")
        return value

    try:
        return json.loads(
            text, object_pairs_hook=make, parse_int=integer, parse_float=decimal, parse_constant=_no_constant
        )
    except RecursionError as error:
        raise GrammarTooLarge("the JSON text is nested too deep") from error
    except json.JSONDecodeError as error:
        raise InvalidGrammar(f"not JSON: {error}") from error


def _unique_keys(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidGrammar(f"the key {twice!r} stands twice in one object")
    return found


def _no_constant(name: str) -> Json:
    raise InvalidGrammar(f"{name} is not JSON")


def _check_size(value: Json, limits: SchemaLimits) -> int:
    """Level by level: how deep the value is nested and how many values it holds. Raises GrammarTooLarge.

    Returns how many keys its objects have.
    """
    count, depth, level, num_keys = 1, 0, [value], 0
    while level:
        below: list[Json] = []
        for item in level:
            kind = type(item)
            if kind is dict:
                num_keys += len(item)
                below += item.values()
            elif kind is list:
                below += item
        count += len(below)
        if count > limits.max_nodes:
            raise GrammarTooLarge(f"the schema holds over {limits.max_nodes} values")
        level = below
        depth += 1
        if depth > limits.max_depth + 1:
            raise GrammarTooLarge(f"the schema is nested over {limits.max_depth} deep")
    return num_keys


def is_number(value: Json) -> bool:
    return isinstance(value, int | Decimal) and not isinstance(value, bool)


def is_integral(value: int | Decimal) -> bool:
    return isinstance(value, int) or value == value.to_integral_value()


def identity(value: Json) -> Hashable:
    """Equal for two values exactly when JSON schema calls them equal."""
    if isinstance(value, bool) or value is None:
        return ("literal", value)
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return ("object", frozenset((name, identity(item)) for name, item in value.items()))
    if isinstance(value, list):
        return ("array", tuple(identity(item) for item in value))
    return ("number", value.normalize(_EXACT) if isinstance(value, Decimal) else Decimal(value))


def json_type(value: Json) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, str):
        return "string"
    if isinstance(value, dict):
        return "object"
    return "array" if isinstance(value, list) else "number"


def string_text(value: str) -> str:
    """The one spelling that the grammar has for a string: raw UTF-8, short escapes, else lower-case \\u00xx."""
    return encode_basestring(value)


def encodable(value: Json) -> bool:
    """False when some string holds a lone surrogate, which no UTF-8 text can spell."""
    if isinstance(value, str) and value.isascii():
        return True
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        return False
    return True


def number_spellings(value: int | Decimal) -> list[str]:
    """The texts that the grammar takes for a number constant: the shortest plain one and the schema's own."""
    own = str(value).replace("E", "e")
    if isinstance(value, int):
        return [own]
    plain = format(value.normalize(_EXACT), "f") if abs(value.adjusted()) < 40 else own
    return list(dict.fromkeys([plain, own.replace("e+", "e"), own]))
