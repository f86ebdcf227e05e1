"""From the fields of a body to protocol values, within the server's limits."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sglite.errors import InvalidRequest
from sglite.grammar import spec as grammar_spec
from sglite.protocol import GrammarSpec, OnUnsupported, SamplingParams
from sglite.runtime.async_engine.arguments import grammar, one_grammar
from sglite.runtime.server.chat.tools import Tool, ToolChoice
from sglite.runtime.server.config import Limits
from sglite.runtime.server.schemas.chat import ResponseFormat
from sglite.runtime.server.schemas.common import ConstraintFields, FunctionSpec, IgnoredFields, SamplingFields


def sampling(
    body: SamplingFields,
    limits: Limits,
    *,
    max_tokens: int | None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """Raises InvalidRequest for a value that cannot work or is over a limit."""
    n = 1 if body.n is None else body.n
    at_most("n", n, limits.max_n)
    at_most("logprobs", logprobs or 0, limits.max_logprobs)
    at_most("prompt_logprobs", prompt_logprobs or 0, limits.max_prompt_logprobs)
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=body.min_tokens or 0,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=body.repetition_penalty,
        logit_bias=_logit_bias(body.logit_bias, limits),
        stop=stop_texts(body.stop, limits),
        stop_regex=stop_texts(body.stop_regex, limits, param="stop_regex"),
        stop_token_ids=_stop_ids(body.stop_token_ids, limits),
        include_stop=body.include_stop_str_in_output,
        ignore_eos=body.ignore_eos,
        seed=None if body.seed is None else body.seed & (2**64 - 1),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        n=n,
        skip_special_tokens=body.skip_special_tokens,
    )


def stop_texts(given: str | Sequence[str] | None, limits: Limits, *, param: str = "stop") -> tuple[str, ...]:
    texts = (given,) if isinstance(given, str) else tuple(given or ())
    at_most(f"the number of {param} texts", len(texts), limits.max_stop, param=param)
    for text in texts:
        at_most(f"the length of a {param} text", len(encoded(text, param)), limits.max_stop_bytes, param=param)
    return texts


def constraint(
    body: ConstraintFields,
    response_format: ResponseFormat | None,
    limits: Limits,
) -> GrammarSpec | None:
    """At most one constraint, from whichever of its names the client uses."""
    fields: dict[str, Any] = {
        "json_schema": _first(body.json_schema, body.guided_json),
        "regex": _first(body.regex, body.guided_regex),
        "choices": _first(body.choice, body.choices, body.guided_choice),
        "ebnf": _first(body.ebnf, body.guided_grammar),
        "lark": body.lark,
        "structural_tag": body.structural_tag,
        **_structured_outputs(body.structured_outputs),
    }
    given: dict[str, Any] = {name: value for name, value in fields.items() if value is not None}
    for name, value in given.items():
        check_size(name, value, limits)
    own = grammar(**given, whitespace=body.whitespace, on_unsupported=body.on_unsupported or "error")
    return one_grammar(own, _format(response_format, body, limits))


def json_schema_answer(
    schema: Mapping[str, Any] | bool | None,
    limits: Limits,
    *,
    strict: bool | None,
    on_unsupported: OnUnsupported | None = None,
    whitespace: Any = "compact",
) -> GrammarSpec:
    """OpenAI's json_schema format: strict refuses what cannot be enforced, otherwise the rest is validated."""
    if schema is None:
        raise InvalidRequest("json_schema needs a schema", param="response_format.json_schema.schema")
    check_size("schema", schema, limits)
    mode: OnUnsupported = on_unsupported or ("error" if strict else "validate")
    return grammar_spec.json_schema(schema, on_unsupported=mode, whitespace=whitespace)


def json_object(body: ConstraintFields) -> GrammarSpec:
    return grammar_spec.json_object(whitespace=body.whitespace)


def tools(functions: Iterable[FunctionSpec], limits: Limits) -> tuple[Tool, ...]:
    found = tuple(
        Tool(f.name, f.parameters or {"type": "object", "properties": {}}, f.description or "", f.strict)
        for f in functions
    )
    at_most("the number of tools", len(found), limits.max_tools, param="tools")
    for tool in found:
        check_size("tools", tool.parameters, limits)
    return found


def tool_choice(mode: Any, *, name: str | None, parallel: bool | None, any_tools: bool) -> ToolChoice:
    """`mode`: None (auto where there are tools), "none", "auto", "required" or "named"."""
    return ToolChoice(mode or ("auto" if any_tools else "none"), name or "", parallel is not False)


def check_metadata(body: IgnoredFields, limits: Limits) -> None:
    at_most("the number of metadata entries", len(body.metadata or ()), limits.max_metadata, param="metadata")


def check_size(name: str, value: Any, limits: Limits) -> None:
    try:
        text = value if isinstance(value, str) else json.dumps(value)
    except RecursionError as error:
        raise InvalidRequest(f"{name} is nested too deeply", param=name) from error
    at_most(f"the size of {name} in bytes", len(encoded(text, name)), limits.max_schema_bytes, param=name)


def at_most(what: str, value: int, limit: int, *, param: str | None = None) -> None:
    if value > limit:
        raise InvalidRequest(f"{what} is {value}; this server allows at most {limit}", param=param or what)


def encoded(text: str, param: str) -> bytes:
    """Raises InvalidRequest for a lone surrogate, which JSON can spell and UTF-8 cannot."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest("the text holds a lone surrogate", param=param) from error


def _format(given: ResponseFormat | None, body: ConstraintFields, limits: Limits) -> GrammarSpec | None:
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return json_object(body)
    if given.type == "structural_tag":
        tag = {"type": "structural_tag", "format": given.format}
        check_size("structural_tag", tag, limits)
        return grammar_spec.structural_tag(tag)
    if given.json_schema is None:
        raise InvalidRequest("response_format json_schema needs its json_schema", param="response_format.json_schema")
    return json_schema_answer(
        given.json_schema.schema_,
        limits,
        strict=given.json_schema.strict,
        on_unsupported=body.on_unsupported,
        whitespace=body.whitespace,
    )


_STRUCTURED = {
    "json": "json_schema", "regex": "regex", "choice": "choices", "grammar": "ebnf", "json_object": "json_object",
    "structural_tag": "structural_tag",
}  # fmt: skip


def _structured_outputs(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """vLLM's name for constraints."""
    found: dict[str, Any] = {}
    for name, value in (given or {}).items():
        if value is None:
            continue
        if name not in _STRUCTURED:
            raise InvalidRequest(f"structured_outputs.{name} is not known", param=f"structured_outputs.{name}")
        found[_STRUCTURED[name]] = value
    return found


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


_INTEGER = re.compile(r"[0-9]{1,10}")


def _logit_bias(given: Mapping[str, float] | None, limits: Limits) -> dict[int, float] | None:
    if not given:
        return None
    at_most("the number of logit_bias entries", len(given), limits.max_logit_bias, param="logit_bias")
    found: dict[int, float] = {}
    for token, bias in given.items():
        if not _INTEGER.fullmatch(token):
            raise InvalidRequest(f"logit_bias maps token ids to numbers; {token[:40]!r} is no id", param="logit_bias")
        if not -100 <= bias <= 100:
            raise InvalidRequest("logit_bias values lie between -100 and 100", param="logit_bias")
        found[int(token)] = bias
    return found


def _stop_ids(given: Sequence[int] | None, limits: Limits) -> tuple[int, ...]:
    at_most("the number of stop_token_ids", len(given or ()), limits.max_logit_bias, param="stop_token_ids")
    return tuple(given or ())
