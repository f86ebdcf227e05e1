"""Prompts as text, ids, or a list of either: checked by hand, at the speed of C.

pydantic tries every member of such a union on every element and keeps an error for each: half a minute for four
megabytes of wrong ones, with the interpreter lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import PlainValidator

from sglite.runtime.server.schemas.common import MAX_ITEMS, TokenId

_MAX_ID = 2**31 - 1


def _texts(value: Any) -> str | list[str]:
    if isinstance(value, str) or (isinstance(value, list) and set(map(type, value)) <= {str}):
        return value
    raise ValueError("must be a text or a list of texts")


def _ids(value: Any) -> list[int] | list[list[int]]:
    if isinstance(value, list):
        if not value or _are_ids(value):
            return value
        if set(map(type, value)) == {list} and len(value) <= MAX_ITEMS and all(map(_are_ids, value)):
            return value
    raise ValueError(f"must be a list of token ids, or a list of at most {MAX_ITEMS} such lists")


def _id_list(value: Any) -> list[int]:
    if isinstance(value, list) and _are_ids(value):
        return value
    raise ValueError("must be a list of token ids")


def _prompt(value: Any) -> Any:
    if isinstance(value, str) or (isinstance(value, list) and value and isinstance(value[0], str)):
        return _texts(value)
    return _ids(value)


def _are_ids(value: Sequence[Any]) -> bool:
    """True for []."""
    return set(map(type, value)) <= {int} and (not value or (min(value) >= 0 and max(value) <= _MAX_ID))


Texts = Annotated[Any, PlainValidator(_texts, json_schema_input_type=str | list[str])]
Ids = Annotated[Any, PlainValidator(_ids, json_schema_input_type=list[TokenId] | list[list[TokenId]])]
Prompt = Annotated[
    Any, PlainValidator(_prompt, json_schema_input_type=str | list[str] | list[TokenId] | list[list[TokenId]])
]
IdList = Annotated[Any, PlainValidator(_id_list, json_schema_input_type=list[TokenId])]
