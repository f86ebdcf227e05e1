"""Requests that a program built by hand, checked field by field on the caller's thread.

msgspec checks types where it decodes, not where a constructor is called; a value of the wrong type would otherwise be
met by the step loop, in the middle of everybody's work.
"""

from __future__ import annotations

import math
import operator
from functools import lru_cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

import msgspec

from sglite.errors import InvalidRequest
from sglite.protocol import GenerateRequest, GrammarSpec, ProgramRef, SamplingParams, ScoreRequest

T = TypeVar("T", bound=msgspec.Struct)
Request = GenerateRequest | ScoreRequest

_INT64 = 1 << 63
_PLAIN = (str, int, float, bool, NoneType)
_IDS = ("prompt", "continuations", "grammar_after")  # token ids are checked, and made plain, elsewhere


def checked_fields(request: Any) -> Any:
    """The request, with whole numbers of any integer type (numpy's too) as plain ones. Raises InvalidRequest, which
    names the field."""
    if not isinstance(request, Request):
        raise InvalidRequest(f"a request is a GenerateRequest or a ScoreRequest, not {type(request).__name__}")
    if isinstance(request, GenerateRequest) and not isinstance(request.sampling_params, SamplingParams):
        raise InvalidRequest(
            f"sampling_params must be a SamplingParams, not {type(request.sampling_params).__name__}",
            param="sampling_params",
        )
    checked = _plain(request, skip=_IDS)
    if isinstance(request, GenerateRequest):
        for name in ("stop", "stop_regex"):
            if not all(map(_encodes, getattr(request.sampling_params, name))):
                raise InvalidRequest(f"{name} holds a lone surrogate", param=name)
    for name in ("grammar", "program"):
        part: GrammarSpec | ProgramRef | None = getattr(checked, name, None)
        if part is not None:
            plain = _plain(part, prefix=f"{name}.")
            if plain is not part:
                checked = msgspec.structs.replace(checked, **{name: plain})
    return checked


def checked_grammar(spec: Any) -> GrammarSpec:
    """Raises InvalidRequest."""
    if not isinstance(spec, GrammarSpec):
        raise InvalidRequest(f"a grammar is a GrammarSpec, not {type(spec).__name__}", param="grammar")
    return _plain(spec, prefix="grammar.")


def checked_text(value: Any, param: str) -> str:
    """Raises InvalidRequest."""
    if not isinstance(value, str):
        raise InvalidRequest(f"{param} must be a text, not {type(value).__name__}", param=param)
    if wrong := _impossible(value):  # one that a frame cannot hold would take along what is sent with it
        raise InvalidRequest(f"{param} {wrong}", param=param)
    return value


def checked_seconds(value: Any, param: str) -> float:
    """Raises InvalidRequest."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise InvalidRequest(f"{param} must be a number of seconds, not {value!r:.80}", param=param)
    return float(value)


def _plain(value: T, *, skip: tuple[str, ...] = (), prefix: str = "") -> T:
    changed: dict[str, Any] = {}
    for name, kind, exact in _fields(type(value)):
        if name in skip:
            continue
        given = made = getattr(value, name)
        if given is None and NoneType in exact:
            continue
        if type(given) not in exact:
            try:
                made = msgspec.convert(_as_plain_int(given), kind)
            except (msgspec.ValidationError, TypeError, ValueError, LookupError) as error:  # of strange types, too
                raise InvalidRequest(f"{prefix}{name}: {error}, not {given!r:.80}", param=prefix + name) from None
        wrong = _impossible(made)
        if wrong:
            raise InvalidRequest(f"{prefix}{name} {wrong}", param=prefix + name)
        if made is not given:
            changed[name] = made
    return msgspec.structs.replace(value, **changed) if changed else value


def _impossible(value: Any) -> str:
    """What is wrong with a value of the right type; "" for nothing."""
    match value:
        case bool():
            return ""
        case int():
            return "" if -_INT64 <= value < _INT64 else "must fit into 64 bits"
        case float():
            return "" if math.isfinite(value) else "must be a finite number"
        case str():
            return "" if value.isascii() or _encodes(value) else "holds a lone surrogate"
    return ""


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@lru_cache(maxsize=16)
def _fields(kind: type[msgspec.Struct]) -> tuple[tuple[str, Any, frozenset[type]], ...]:
    """Of each field its name, its type, and the plain types whose values need no look."""
    return tuple((field.name, field.type, _exact(field.type)) for field in msgspec.structs.fields(kind))


def _exact(kind: Any) -> frozenset[type]:
    return frozenset(one for one in (get_args(kind) or (kind,)) if one in _PLAIN) if _is_union(kind) else frozenset()


def _is_union(kind: Any) -> bool:
    """Or one plain type."""
    return kind in _PLAIN or isinstance(kind, UnionType) or get_origin(kind) is Union


def _as_plain_int(value: Any) -> Any:
    """numpy's integers and their like have `__index__`; texts, floats and plain values have none or are left alone."""
    if value is None or isinstance(value, bool | int | float | str) or not hasattr(value, "__index__"):
        return value
    try:
        return operator.index(value)
    except TypeError:
        return value
