"""POST /v1/chat/completions"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from fastapi import Request
from starlette.responses import Response

from sglite.errors import InvalidRequest
from sglite.protocol import RequestOutput
from sglite.runtime.server import convert
from sglite.runtime.server import openai_shapes as shapes
from sglite.runtime.server.body import make_router
from sglite.runtime.server.chat import run
from sglite.runtime.server.chat.parts import Part, Reasoning, Text, ToolArguments, ToolStart
from sglite.runtime.server.chat.turn import Answer, PreparedTurn, Turn
from sglite.runtime.server.config import Limits
from sglite.runtime.server.deps import CallDep, ServiceDep
from sglite.runtime.server.schemas.chat import ChatRequest, Message, NamedTool
from sglite.runtime.server.service import Call, Service
from sglite.runtime.server.sse import DONE, EventStream, event, guarded, json_response, primed, while_connected

router = make_router()

# What a template is given by the server itself.
_TEMPLATES_OWN = frozenset(
    {"self", "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"}
)


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatRequest, request: Request, service: ServiceDep, call: CallDep) -> Response:
    """Complete a conversation."""
    service.check_model(body.model)
    prepared = await run.prepare(service, turn(body, service.config.limits))
    frame = {"id": f"chatcmpl-{call.record.request_id}", "created": int(time.time()), "model": service.model_name}
    if body.stream:
        events = await while_connected(request, primed(_stream(service, prepared, call, body, frame)))
        return EventStream(guarded(events, request.url.path))
    return json_response(await while_connected(request, _whole(service, prepared, call, body, frame)))


def turn(body: ChatRequest, limits: Limits) -> Turn:
    """Raises InvalidRequest for what this server does not do."""
    _refuse(body, limits)
    convert.check_metadata(body, limits)
    convert.at_most("the number of messages", len(body.messages), limits.max_messages, param="messages")
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    tools = convert.tools([tool.function for tool in body.tools or ()], limits)
    named = body.tool_choice.function.name if isinstance(body.tool_choice, NamedTool) else None
    return Turn(
        messages=[message_for_template(message) for message in body.messages],
        sampling=convert.sampling(body, limits, max_tokens=max_tokens, logprobs=logprobs),
        tools=tools,
        tool_choice=convert.tool_choice(
            "named" if named else body.tool_choice,
            name=named,
            parallel=body.parallel_tool_calls,
            any_tools=bool(tools),
        ),
        answer=convert.constraint(body, body.response_format, limits),
        thinking=_thinking(body),
        think_budget=body.thinking_budget,
        split_reasoning=body.separate_reasoning,
        close_on_budget=body.close_on_budget,
        jump_forward=body.jump_forward,
        truncate_prompt=body.truncate_prompt,
        template_args=body.chat_template_kwargs or {},
        continue_last=body.continue_final_message,
    )


def message_for_template(message: Message) -> dict[str, Any]:
    """As chat templates expect it: content as text, a call's arguments as an object."""
    content = message.content
    if not isinstance(content, str) and content is not None:
        content = "".join(_text_of(part.type, part.text, part.refusal) for part in content)
    role = "system" if message.role == "developer" else message.role
    found: dict[str, Any] = {"role": role, "content": content or ""}
    if message.name:
        found["name"] = message.name
    if message.tool_call_id:
        found["tool_call_id"] = message.tool_call_id
    if message.reasoning_content:
        found["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": arguments_object(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    return found


def arguments_object(text: str) -> Any:
    """A past call's arguments as the object that templates want; as they were where they are none."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _text_of(kind: str, text: str | None, refusal: str | None) -> str:
    if kind in ("text", "input_text", "output_text"):
        return text or ""
    if kind == "refusal":
        return refusal or ""
    raise InvalidRequest(
        f"this model takes text only; a content part of type {kind[:40]!r} is refused", param="messages"
    )


def _refuse(body: ChatRequest, limits: Limits) -> None:
    if body.chat_template is not None or "chat_template" in (body.chat_template_kwargs or {}):
        raise InvalidRequest("a chat template of the request's own is not accepted", param="chat_template")
    convert.check_size("chat_template_kwargs", body.chat_template_kwargs or {}, limits)
    for name in body.chat_template_kwargs or {}:
        if name in _TEMPLATES_OWN or not name.isidentifier():
            raise InvalidRequest(f"chat_template_kwargs cannot hold {name[:40]!r}", param="chat_template_kwargs")
    if body.functions is not None or body.function_call is not None:
        raise InvalidRequest("functions and function_call are gone; use tools and tool_choice", param="functions")
    if body.modalities is not None and body.modalities != ["text"]:
        raise InvalidRequest("the only modality is text", param="modalities")


def _thinking(body: ChatRequest) -> bool | None:
    if body.enable_thinking is not None:
        return body.enable_thinking
    return False if body.reasoning_effort in ("none", "minimal") else None


async def _whole(
    service: Service, prepared: PreparedTurn, call: Call, body: ChatRequest, frame: Mapping[str, Any]
) -> dict[str, Any]:
    answers: dict[int, tuple[Answer, list[RequestOutput]]] = {}
    async with aclosing(run.progress(service, prepared, call, stream=False)) as steps:
        async for answer, _, output in steps:
            answers.setdefault(answer.index, (answer, []))[1].append(output)
    values = sum(len(output.logprobs) for _, outputs in answers.values() for output in outputs)
    choices = await service.prompt_threads.shape(
        lambda: [_choice(service, answer, outputs, body) for _, (answer, outputs) in sorted(answers.items())],
        values=values * (1 + (body.top_logprobs or 0)),
    )
    done = [answer for _, (answer, _) in sorted(answers.items())]
    last = [outputs[-1] for _, outputs in answers.values()]
    whole = {
        **frame,
        "object": "chat.completion",
        "choices": choices,
        "usage": shapes.usage(run.total_usage(done), reasoning_tokens=sum(a.reasoning_tokens for a in done)),
    }
    missing = shapes.unenforced(last[0].coverage)
    return {**whole, "unenforced": missing} if missing else whole


def _choice(service: Service, answer: Answer, outputs: list[RequestOutput], body: ChatRequest) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
    if not answer.text and (answer.calls or answer.reasoning):
        message["content"] = None
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [
            {"id": _call_id(), "type": "function", "function": {"name": name, "arguments": arguments}}
            for name, arguments in answer.calls
        ]
    entries = [entry for output in outputs for entry in output.logprobs]
    choice: dict[str, Any] = {
        "index": answer.index,
        "message": message,
        "logprobs": {"content": shapes.chat_logprobs(service.tokenizer, entries)} if body.logprobs else None,
        "finish_reason": shapes.finish_reason(answer.finish_reason, called=bool(answer.calls)),
    }
    if isinstance(answer.matched_stop, str):
        choice["stop_reason"] = answer.matched_stop
    if answer.reason:
        choice["reason"] = answer.reason
    return choice


async def _stream(
    service: Service, prepared: PreparedTurn, call: Call, body: ChatRequest, frame: Mapping[str, Any]
) -> AsyncGenerator[bytes, None]:
    options = body.stream_options
    base: dict[str, Any] = {**frame, "object": "chat.completion.chunk"}
    if options is not None and options.include_usage:
        base["usage"] = None
    answers: dict[int, Answer] = {}
    async with aclosing(run.progress(service, prepared, call, stream=True)) as steps:
        async for answer, parts, output in steps:
            if answer.index not in answers:
                answers[answer.index] = answer
                yield event(_chunk(base, answer.index, {"role": "assistant", "content": ""}))
            deltas = [_delta(part) for part in parts]
            logprobs = None
            if body.logprobs and output.logprobs:
                logprobs = {"content": shapes.chat_logprobs(service.tokenizer, output.logprobs)}
                deltas = deltas or [{}]
            for delta in deltas:
                yield event(_chunk(base, answer.index, delta, logprobs=logprobs))
                logprobs = None
            if output.finished:
                yield event(_last_chunk(base, answer, output))
    if options is not None and options.include_usage:
        done = [answer for _, answer in sorted(answers.items())]
        counts = shapes.usage(run.total_usage(done), reasoning_tokens=sum(a.reasoning_tokens for a in done))
        yield event({**base, "choices": [], "usage": counts})
    yield DONE


def _chunk(
    base: Mapping[str, Any], index: int, delta: Mapping[str, Any], *, logprobs: Any = None, finish: str | None = None
) -> dict[str, Any]:
    choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
    return {**base, "choices": [choice]}


def _last_chunk(base: Mapping[str, Any], answer: Answer, output: RequestOutput) -> dict[str, Any]:
    finish = shapes.finish_reason(answer.finish_reason, called=bool(answer.calls))
    chunk = _chunk(base, answer.index, {}, finish=finish)
    if isinstance(answer.matched_stop, str):
        chunk["choices"][0]["stop_reason"] = answer.matched_stop
    if answer.reason:
        chunk["choices"][0]["reason"] = answer.reason
    missing = shapes.unenforced(output.coverage)
    return {**chunk, "unenforced": missing} if missing else chunk


def _delta(part: Part) -> dict[str, Any]:
    match part:
        case Text(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text}
        case ToolStart(index, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": _call_id(), "type": "function", "function": function}]}
        case ToolArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"
