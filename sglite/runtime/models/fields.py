"""Fields of a model's JSON files, each with the kind of value that it must have.

The files come with a model: a wrong value is told by the file, the field and what it holds, before anything is built
from it. Null is the same as a field that is not there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sglite.errors import UnsupportedModel

MAX_COUNT = 2**31 - 1  # sizes are held as int32 in places


class Fields:
    """Reads one JSON object. Every method raises UnsupportedModel for a value of another kind.

    `where`: the object in error texts, for example "/models/x: config.json's".
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = values
        self._where = where

    def count(self, field: str, default: int | None = None, *, most: int = MAX_COUNT) -> int:
        """From 1 to `most`; 8192.0 is 8192."""
        value = self._get(field, default)
        whole = isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1
        if not whole or not 1 <= value <= most:
            limit = "" if most == MAX_COUNT and not whole else f" of at most {most}"
            raise self.wrong(field, f"a positive integer{limit}", value)
        return int(value)

    def number(self, field: str, default: float | None = None) -> float:
        """Above zero and finite."""
        value = self._get(field, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1e38:
            raise self.wrong(field, "a number above 0", value)
        return float(value)

    def optional(self, field: str) -> float | None:
        return None if self._values.get(field) is None else self.number(field)

    def flag(self, field: str, default: bool = False) -> bool:
        value = self._get(field, default)
        if not isinstance(value, bool):
            raise self.wrong(field, "true or false", value)
        return value

    def texts(self, field: str) -> list[str]:
        """A list of strings; empty where there is none."""
        value = self._get(field, None)
        value = [] if value is None else value
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(field, "a list of texts", value)
        return value

    def object(self, field: str) -> Mapping[str, Any]:
        """Empty where there is none."""
        value = self._get(field, None)
        value = {} if value is None else value
        if not isinstance(value, Mapping):
            raise self.wrong(field, "an object", value)
        return value

    def wrong(self, field: str, wants: str, value: Any) -> UnsupportedModel:
        return UnsupportedModel(f"{self._where} {field!r} must be {wants}, not {_short(value)}")

    def _get(self, field: str, default: Any) -> Any:
        value = self._values.get(field)
        return default if value is None else value


def _short(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return "a number that is not finite"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
