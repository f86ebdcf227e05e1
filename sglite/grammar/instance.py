"""JSON values that remember how their numbers were written, and their compact text.

A constraint decides on texts, so checking a value against it needs one text: no white space, UTF-8, keys in order,
the shortest escapes, numbers as they were.
"""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

from sglite.errors import InvalidRequest


class _WrittenInt(int):
    text: str


class _WrittenDecimal(Decimal):
    text: str


def parse(text: str) -> Any:
    """Raises InvalidRequest. Of a key that stands twice the last value counts, as everywhere in Python."""
    try:
        return json.loads(text, parse_int=_integer, parse_float=_decimal, parse_constant=_no_constant)
    except RecursionError as error:
        raise InvalidRequest("the instance is nested too deeply") from error
    except ValueError as error:
        raise InvalidRequest(f"the instance is not JSON: {error}") from error


def compact(value: Any) -> bytes:
    """The UTF-8 text of what `parse` gave. A lone surrogate, which UTF-8 cannot hold, stays an escape."""
    pieces: list[str] = []
    try:
        _write(value, pieces)
    except RecursionError as error:
        raise InvalidRequest("the instance is nested too deeply") from error
    return "".join(pieces).encode()


def _write(value: Any, pieces: list[str]) -> None:
    if isinstance(value, dict):
        lead = "{"
        for key, item in value.items():
            pieces += (lead, _string(key), ":")
            _write(item, pieces)
            lead = ","
        pieces.append("}" if value else "{}")
    elif isinstance(value, list):
        lead = "["
        for item in value:
            pieces.append(lead)
            _write(item, pieces)
            lead = ","
        pieces.append("]" if value else "[]")
    elif isinstance(value, _WrittenInt | _WrittenDecimal):
        pieces.append(value.text)
    elif isinstance(value, str):
        pieces.append(_string(value))
    else:
        pieces.append(json.dumps(value))


def _string(text: str) -> str:
    written = json.dumps(text, ensure_ascii=False)
    return "".join(f"\\u{ord(c):04x}" if "\ud800" <= c <= "\udfff" else c for c in written)


def _integer(text: str) -> _WrittenInt:
    value = _WrittenInt(text)
    value.text = text
    return value


def _decimal(text: str) -> _WrittenDecimal:
    value = _WrittenDecimal(text)
    value.text = text
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")
