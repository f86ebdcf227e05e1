"""What callers of `Engine.generate` may write, as protocol values.

sampling: dict (ours or SGLang's names) | SamplingParams | None  ->  SamplingParams and, from a dict, a GrammarSpec
prompt:   text | token ids | a list of either                    ->  a list, and whether it was one
"""

from __future__ import annotations

import numbers
import operator
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import msgspec
import numpy as np

from sglite.errors import InvalidRequest, did_you_mean
from sglite.grammar import spec as grammar_spec
from sglite.protocol import GrammarSpec, OnUnsupported, SamplingParams, Whitespace

Prompt = str | Sequence[int]
Sampling = SamplingParams | Mapping[str, Any] | None

_MAX_ID = 1 << 31  # no vocabulary is as large

DEFAULT_MAX_TOKENS = 128  # where neither a SamplingParams nor a dict says anything, as in SGLang

_ALIASES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "no_stop_trim": "include_stop",
    "include_stop_str_in_output": "include_stop",
    "sampling_seed": "seed",
}
_GRAMMARS = ("json_schema", "json_object", "regex", "choices", "ebnf", "lark", "structural_tag")
_FIELDS = frozenset(SamplingParams.__struct_fields__)
_TEXT_FIELDS = ("stop", "stop_regex")


def sampling_params(
    given: Sampling, *, whitespace: Whitespace = "compact", on_unsupported: OnUnsupported = "error"
) -> tuple[SamplingParams, GrammarSpec | None]:
    """`whitespace` and `on_unsupported` are for a schema in a dict. Raises InvalidRequest for an unknown name or a
    value of the wrong type."""
    if isinstance(given, SamplingParams):
        return given, None
    values: dict[str, Any] = {"max_tokens": DEFAULT_MAX_TOKENS}
    constraints: dict[str, Any] = {}
    for name, value in (given or {}).items():
        field = _ALIASES.get(name, name)
        if field in _GRAMMARS:
            constraints[field] = value
        elif field not in _FIELDS:
            raise _unknown(name)
        else:
            values[field] = _plain(field, value)
    try:
        params = msgspec.convert(values, SamplingParams)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"sampling parameters: {error}", param="sampling_params") from error
    return params, grammar(**constraints, whitespace=whitespace, on_unsupported=on_unsupported)


def split_truncate(given: Sampling) -> tuple[Sampling, bool]:
    """A dict without its `truncate_prompt`, which is the request's and no sampling parameter, and what it says."""
    if not isinstance(given, Mapping) or "truncate_prompt" not in given:
        return given, False
    value = given["truncate_prompt"]
    if not isinstance(value, bool | None):
        raise InvalidRequest(f"truncate_prompt must be true or false, not {value!r}", param="truncate_prompt")
    return {name: each for name, each in given.items() if name != "truncate_prompt"}, bool(value)


def grammar(
    *,
    json_schema: Any = None,
    json_object: bool | None = None,
    regex: str | None = None,
    choices: Sequence[str] | None = None,
    ebnf: str | None = None,
    lark: str | None = None,
    structural_tag: Any = None,
    whitespace: Whitespace = "compact",
    on_unsupported: OnUnsupported = "error",
) -> GrammarSpec | None:
    """At most one constraint. Raises InvalidRequest for two, GrammarError for one that cannot work."""
    given = {
        name: value
        for name, value in (
            ("json_schema", json_schema),
            ("json_object", json_object or None),
            ("regex", regex),
            ("choices", choices),
            ("ebnf", ebnf),
            ("lark", lark),
            ("structural_tag", structural_tag),
        )
        if value is not None
    }
    if len(given) > 1:
        raise InvalidRequest(f"only one constraint at a time, not {' and '.join(given)}", param=list(given)[1])
    if json_schema is not None:
        return grammar_spec.json_schema(json_schema, whitespace=whitespace, on_unsupported=on_unsupported)
    if json_object:
        return grammar_spec.json_object(whitespace=whitespace)
    if regex is not None:
        return grammar_spec.regex(regex)
    if choices is not None:
        return grammar_spec.choice(choices)
    if ebnf is not None:
        return grammar_spec.ebnf(ebnf)
    if lark is not None:
        return grammar_spec.lark(lark)
    if structural_tag is not None:
        return grammar_spec.structural_tag(structural_tag)
    return None


def one_grammar(*found: GrammarSpec | None) -> GrammarSpec | None:
    """Raises InvalidRequest when a call says its constraint in two places."""
    specs = [spec for spec in found if spec is not None]
    if len(specs) > 1:
        raise InvalidRequest("only one constraint at a time: in the sampling parameters or as an argument")
    return specs[0] if specs else None


def is_single(prompt: Prompt | Sequence[Prompt]) -> TypeGuard[Prompt]:
    """Text, or token ids in a list or an array ([] is one empty prompt). Raises InvalidRequest for neither, and for a
    list that holds something else, which it names."""
    if isinstance(prompt, str):
        return True
    if not _may_be_ids(prompt):
        raise InvalidRequest(f"a prompt is a text or a list of token ids, not {_short(prompt)}", param="prompt")
    if not len(prompt) or isinstance(prompt[0], numbers.Number | None) or getattr(prompt[0], "ndim", 1) == 0:
        return True
    for i, each in enumerate(prompt):
        if not isinstance(each, str) and not _may_be_ids(each):
            raise InvalidRequest(
                f"prompt {i} of the list must be a text or a list of token ids, not {_short(each)}", param="prompt"
            )
    return False


def _may_be_ids(value: Any) -> bool:
    """A list, a tuple, an array of any library: bytes are none, though they hold numbers."""
    if isinstance(value, str | bytes | bytearray | Mapping) or getattr(value, "ndim", 1) == 0:
        return False
    return hasattr(value, "__len__") and hasattr(value, "__getitem__")


def checked_ids(given: Any, param: str) -> tuple[int, ...]:
    """Token ids of any integer type (numpy's too) as plain ones. Raises InvalidRequest."""
    try:
        # Packed into 32 bits: a quarter of the time of looking at each id in Python, which long prompts would wait for.
        packed = array("i", given if isinstance(given, list | tuple) else map(operator.index, given))
    except TypeError as error:
        raise InvalidRequest(f"{param}: token ids must be whole numbers, not {_short(given)}", param=param) from error
    except OverflowError as error:
        wrong = next(i for i in map(operator.index, given) if not 0 <= i < _MAX_ID)
        raise InvalidRequest(f"token id {wrong} is not in the vocabulary", param=param) from error
    if packed and np.frombuffer(packed, np.int32).min() < 0:
        wrong = next(i for i in packed if i < 0)
        raise InvalidRequest(f"token id {wrong} is not in the vocabulary", param=param)
    return tuple(packed)


def checked_id_lists(given: Any, param: str) -> tuple[tuple[int, ...], ...]:
    """Raises InvalidRequest."""
    if isinstance(given, str | Mapping):
        raise InvalidRequest(f"{param} must be a list of lists of token ids, not {_short(given)}", param=param)
    try:
        lists = tuple(given)
    except TypeError as error:
        raise InvalidRequest(
            f"{param} must be a list of lists of token ids, not {_short(given)}", param=param
        ) from error
    return tuple(checked_ids(each, param) for each in lists)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def _unknown(name: str) -> InvalidRequest:
    meant = did_you_mean(name, _FIELDS | set(_ALIASES) | set(_GRAMMARS))
    return InvalidRequest(
        f"unknown sampling parameter {name!r}; {meant and meant + ' '}known: {', '.join(sorted(_FIELDS))}; "
        f"constraints: {', '.join(_GRAMMARS)}; of the request: truncate_prompt",
        param=name,
    )


def _plain(field: str, value: Any) -> Any:
    if field in (*_TEXT_FIELDS, "stop_token_ids"):
        if isinstance(value, str) and field in _TEXT_FIELDS:
            return (value,)
        if not isinstance(value, list | tuple | set | frozenset | None):
            raise InvalidRequest(f"{field} must be a list, not {_short(value)}", param=field)
        return tuple(value or ())
    if field == "logit_bias" and value is not None:
        try:
            return {int(token): float(bias) for token, bias in value.items()}
        except (TypeError, ValueError, AttributeError) as error:
            raise InvalidRequest("logit_bias maps token ids to numbers", param="logit_bias") from error
    return value
