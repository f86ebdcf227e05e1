"""Programs on any API that speaks OpenAI's: `sglite.OpenAI("gpt-4o-mini")`, or with `base_url=` somebody else's.

Text only: no token ids, so no scoring. `select` asks for one of its options under a JSON schema. Constraints are sent
as `response_format` where the API has words for them (JSON schema, JSON object) and refused else; a sampling parameter
that the API does not have is refused too.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from sglite.errors import BackendError, InvalidRequest
from sglite.lang.backends.http import Http, known_shape
from sglite.protocol import (
    Coverage,
    FinishReason,
    GenerateRequest,
    GrammarSpec,
    ModelInfo,
    RequestOutput,
    SamplingParams,
    ScoreOutput,
    ScoreRequest,
    Usage,
)

_URL = "https://api.openai.com/v1"
_COMPLETION_MODELS = ("gpt-3.5-turbo-instruct", "davinci-002", "babbage-002")

# Not in OpenAI's API: (field, value that asks for nothing)
_UNKNOWN = (
    ("top_k", None),
    ("min_p", None),
    ("repetition_penalty", None),
    ("stop_regex", ()),
    ("stop_token_ids", ()),
    ("ignore_eos", False),
    ("min_tokens", 0),
    ("logprobs", None),
    ("prompt_logprobs", None),
    ("include_stop", False),
    ("skip_special_tokens", True),
)
_NEUTRAL = {"top_k": (-1, 0), "min_p": (0.0,), "repetition_penalty": (1.0,)}

_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "content_filter": FinishReason.ABORT}


def OpenAI(
    model_name: str,
    *,
    base_url: str | None = None,
    api_key: str | None = None,
    is_chat_model: bool | None = None,
    timeout_s: float = 600.0,
) -> ChatApi | CompletionApi:
    """A backend. `base_url` and `api_key` default to OPENAI_BASE_URL and OPENAI_API_KEY.

    `is_chat_model`: programs write chats with roles; False: they write plain text (the older completions API).
    """
    url = base_url or os.environ.get("OPENAI_BASE_URL") or _URL
    http = Http(url, api_key=api_key or os.environ.get("OPENAI_API_KEY"), timeout_s=timeout_s)
    chat = model_name not in _COMPLETION_MODELS if is_chat_model is None else is_chat_model
    return ChatApi(http, model_name) if chat else CompletionApi(http, model_name)


class _Api:
    tokenizer = None

    def __init__(self, http: Http, model: str) -> None:
        self._http = http
        self.model_info = ModelInfo(name=model)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    async def score_request(self, request: ScoreRequest) -> ScoreOutput:
        raise InvalidRequest("this API cannot score texts")

    async def compile_grammar(self, spec: GrammarSpec) -> Coverage:
        """Only whether it can be sent; what the API makes of it is seen at the first use."""
        response_format(spec)
        return Coverage(engine=self._http.base_url)

    async def warm_prefix(self, token_ids: tuple[int, ...], *, namespace: str = "", lease_s: float = 60.0) -> int:
        return 0

    async def abort(self, request_id: str) -> None:
        """Closing the stream ends the request."""

    async def release(self, request_id: str) -> None:
        """Nothing is held."""

    async def end_program(self, program_id: str) -> None:
        """Nothing is kept."""

    async def flush_cache(self) -> bool:
        return False


class ChatApi(_Api):
    """Satisfies `sglite.lang.client.ChatClient`, over /chat/completions."""

    async def stream_request(self, request: GenerateRequest) -> AsyncGenerator[RequestOutput]:
        messages = [{"role": "user", "content": str(request.prompt)}]
        async for output in self.stream_chat(messages, request):
            yield output

    async def stream_chat(
        self, messages: Sequence[Mapping[str, Any]], request: GenerateRequest
    ) -> AsyncGenerator[RequestOutput]:
        limit = "max_completion_tokens" if self._http.base_url == _URL else "max_tokens"
        body = {"messages": list(messages), **_body(self.model_info.name, request, limit)}
        unwrap = _unwrap if request.grammar is not None and request.grammar.kind == "choice" else str
        if request.grammar is not None:
            body["response_format"] = response_format(request.grammar)
        async for output in _answers(
            self._http, "/chat/completions", body, request, stream=request.stream and unwrap is str
        ):
            yield RequestOutput(
                request_id=request.request_id,
                index=output.index,
                text=unwrap(output.text),
                finish_reason=output.finish_reason,
                usage=output.usage,
            )


class CompletionApi(_Api):
    """Satisfies `sglite.lang.client.Client`, over /completions, which has no constraints."""

    async def stream_request(self, request: GenerateRequest) -> AsyncGenerator[RequestOutput]:
        if request.grammar is not None:
            raise InvalidRequest(
                f"the completions API cannot enforce a {request.grammar.kind} constraint; use a chat model"
            )
        body = {"prompt": request.prompt, **_body(self.model_info.name, request, "max_tokens")}
        async for output in _answers(self._http, "/completions", body, request, stream=request.stream):
            yield output

    async def compile_grammar(self, spec: GrammarSpec) -> Coverage:
        raise InvalidRequest(f"the completions API cannot enforce a {spec.kind} constraint; use a chat model")


def response_format(spec: GrammarSpec) -> dict[str, Any]:
    """Raises InvalidRequest for a constraint that OpenAI's API has no words for."""
    match spec.kind:
        case "json_schema" if spec.on_unsupported == "error" and spec.whitespace == "compact":
            schema = json.loads(spec.source)
        case "json_object":
            return {"type": "json_object"}
        case "choice":
            schema = {
                "type": "object",
                "properties": {"choice": {"enum": json.loads(spec.source)}},
                "required": ["choice"],
                "additionalProperties": False,
            }
        case _:
            raise InvalidRequest(f"OpenAI's API cannot enforce this {spec.kind} constraint; use an sglite backend")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": schema, "strict": True}}


def _unwrap(text: str) -> str:
    """The chosen text. Raises BackendError where the API did not keep to the schema."""
    try:
        return str(json.loads(text)["choice"])
    except (ValueError, KeyError, TypeError) as error:
        raise BackendError(f"the API answered {text[:200]!r} in place of a choice") from error


def _body(model: str, request: GenerateRequest, limit: str) -> dict[str, Any]:
    """Raises InvalidRequest for what the API does not have."""
    params = request.sampling_params
    _check(params)
    if request.close_on_budget or request.grammar_after:
        raise InvalidRequest("OpenAI's API takes no close_on_budget or grammar_after")
    values = {
        limit: params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "presence_penalty": params.presence_penalty or None,
        "frequency_penalty": params.frequency_penalty or None,
        "stop": list(params.stop) or None,
        "seed": params.seed,
        "logit_bias": None if not params.logit_bias else {str(k): v for k, v in params.logit_bias.items()},
        "n": None if params.n == 1 else params.n,
    }
    return {"model": model, **{name: value for name, value in values.items() if value is not None}}


def _check(params: SamplingParams) -> None:
    for name, unset in _UNKNOWN:
        value = getattr(params, name)
        if value != unset and value not in _NEUTRAL.get(name, ()):
            raise InvalidRequest(f"OpenAI's API has no {name}", param=name)


async def _answers(
    http: Http, path: str, body: dict[str, Any], request: GenerateRequest, *, stream: bool
) -> AsyncGenerator[RequestOutput]:
    """Raises BackendError for an answer in another shape."""
    if not stream:
        answer = await http.post(path, body)
        with known_shape():
            for choice in answer["choices"]:
                yield _output(request, choice, _text(choice, "message"), _usage(answer.get("usage")))
        return
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    # The usage comes after the last choice: each choice's end waits for it.
    ended: dict[int, RequestOutput] = {}
    usage = Usage()
    with known_shape():
        async for answer in http.events(path, asked):
            usage = _usage(answer["usage"]) if answer.get("usage") else usage
            for choice in answer.get("choices") or ():
                output = _output(request, choice, _text(choice, "delta"), Usage())
                if output.finished:
                    ended[output.index] = output
                else:
                    yield output
    for output in ended.values():
        yield RequestOutput(
            request_id=output.request_id,
            index=output.index,
            text=output.text,
            finish_reason=output.finish_reason,
            usage=usage,
        )


def _output(request: GenerateRequest, choice: Mapping[str, Any], text: str, usage: Usage) -> RequestOutput:
    reason = choice.get("finish_reason")
    return RequestOutput(
        request_id=request.request_id,
        index=int(choice.get("index") or 0),
        text=text,
        finish_reason=None if reason is None else _REASONS.get(str(reason), FinishReason.STOP),
        usage=usage,
    )


def _text(choice: Mapping[str, Any], key: str) -> str:
    """Raises BackendError when the model refused to answer."""
    message = choice.get(key)
    if isinstance(message, Mapping):
        if message.get("refusal"):
            raise BackendError(f"the model refused: {message['refusal']}")
        return _string(message.get("content"))
    return _string(choice.get("text"))


def _string(given: Any) -> str:
    if given is not None and not isinstance(given, str):
        raise BackendError(f"the backend's answer is in an unknown shape: its text is {given!r}")
    return given or ""


def _usage(given: Any) -> Usage:
    if not isinstance(given, Mapping):
        return Usage()
    details = given.get("prompt_tokens_details") or {}
    return Usage(
        prompt_tokens=int(given.get("prompt_tokens") or 0),
        completion_tokens=int(given.get("completion_tokens") or 0),
        cached_tokens=int(details.get("cached_tokens") or 0),
    )
