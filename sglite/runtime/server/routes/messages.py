"""POST /v1/messages: Anthropic's messages, with tools and streaming."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import Request
from starlette.responses import Response

from sglite.errors import InvalidRequest
from sglite.protocol import FinishReason, SamplingParams
from sglite.runtime.server import convert
from sglite.runtime.server import openai_shapes as shapes
from sglite.runtime.server.body import make_router
from sglite.runtime.server.chat import run
from sglite.runtime.server.chat.parts import Part, Reasoning, Text, ToolArguments, ToolStart
from sglite.runtime.server.chat.tools import Tool, ToolChoice
from sglite.runtime.server.chat.turn import Answer, PreparedTurn, Turn
from sglite.runtime.server.config import Limits
from sglite.runtime.server.deps import CallDep, ServiceDep
from sglite.runtime.server.schemas.messages import AnthropicToolChoice, Block, CountRequest, MessagesRequest
from sglite.runtime.server.service import Call, Service
from sglite.runtime.server.sse import EventStream, event, guarded, json_response, primed, while_connected

router = make_router()


@router.post("/v1/messages")
async def messages(body: MessagesRequest, request: Request, service: ServiceDep, call: CallDep) -> Response:
    """Complete a conversation, in Anthropic's shapes."""
    service.check_model(body.model)
    prepared = await run.prepare(service, _turn(body, service.config.limits))
    if body.stream:
        events = await while_connected(request, primed(_stream(service, prepared, call)))
        return EventStream(guarded(events, request.url.path))
    return json_response(await while_connected(request, _whole(service, prepared, call)))


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountRequest, service: ServiceDep) -> dict[str, int]:
    """How many tokens the prompt of such a request has."""
    prepared = await run.prepare(service, _turn(body, service.config.limits))
    return {"input_tokens": len(prepared.prompt)}


def _turn(body: MessagesRequest, limits: Limits) -> Turn:
    convert.at_most("the number of messages", len(body.messages), limits.max_messages, param="messages")
    convert.at_most("the number of tools", len(body.tools or ()), limits.max_tools, param="tools")
    convert.at_most("the number of metadata entries", len(body.metadata or ()), limits.max_metadata, param="metadata")
    for given in body.tools or ():
        if given.type not in (None, "custom"):
            raise InvalidRequest(f"tools of type {given.type[:40]!r} do not run here; declare your own", param="tools")
    tools = tuple(
        Tool(t.name, t.input_schema or {"type": "object", "properties": {}}, t.description or "", t.strict)
        for t in body.tools or ()
    )
    for tool in tools:
        convert.check_size("tools", tool.parameters, limits)
    form = body.output_format or (body.output_config.format if body.output_config else None)
    return Turn(
        messages=_history(body),
        sampling=SamplingParams(
            max_tokens=body.max_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            stop=convert.stop_texts(body.stop_sequences, limits, param="stop_sequences"),
        ),
        tools=tools,
        tool_choice=_choice(body.tool_choice, any_tools=bool(tools)),
        answer=None if form is None else convert.json_schema_answer(form.schema_, limits, strict=True),
        thinking=None if body.thinking is None else body.thinking.type != "disabled",
        think_budget=body.thinking.budget_tokens if body.thinking else None,
        continue_last=body.messages[-1].role == "assistant",
    )


def _choice(choice: AnthropicToolChoice | None, *, any_tools: bool) -> ToolChoice:
    if choice is None:
        return ToolChoice("auto" if any_tools else "none")
    parallel = not choice.disable_parallel_tool_use
    if choice.type == "tool":
        return ToolChoice("named", choice.name or "", parallel)
    return ToolChoice({"auto": "auto", "any": "required", "none": "none"}[choice.type], "", parallel)  # type: ignore[arg-type]


def _history(body: MessagesRequest) -> list[dict[str, Any]]:
    """As chat templates expect it: one message a block of tool results, calls beside their text."""
    found: list[dict[str, Any]] = []
    if body.system:
        system = body.system if isinstance(body.system, str) else "\n".join(_text(block) for block in body.system)
        found.append({"role": "system", "content": system})
    for message in body.messages:
        if isinstance(message.content, str):
            found.append({"role": message.role, "content": message.content})
            continue
        results = [block for block in message.content if block.type == "tool_result"]
        calls = [block for block in message.content if block.type == "tool_use"]
        thoughts = [block.thinking or "" for block in message.content if block.type == "thinking"]
        others = [
            b for b in message.content if b.type not in ("tool_result", "tool_use", "thinking", "redacted_thinking")
        ]
        found += [{"role": "tool", "tool_call_id": b.tool_use_id or "", "content": _result(b)} for b in results]
        if others or calls or thoughts:
            said: dict[str, Any] = {"role": message.role, "content": "".join(_text(block) for block in others)}
            if thoughts:
                said["reasoning_content"] = "\n".join(thoughts)
            if calls:
                said["tool_calls"] = [
                    {"id": b.id, "type": "function", "function": {"name": b.name or "", "arguments": b.input or {}}}
                    for b in calls
                ]
            found.append(said)
    return found


def _text(block: Block) -> str:
    if block.type != "text":
        raise InvalidRequest(f"this model takes text only; a block of type {block.type[:40]!r} is refused")
    return block.text or ""


def _result(block: Block) -> str:
    if block.content is None or isinstance(block.content, str):
        return block.content or ""
    return "".join(_text(part) for part in block.content)


async def _whole(service: Service, prepared: PreparedTurn, call: Call) -> dict[str, Any]:
    last: run.Progress | None = None
    async with aclosing(run.progress(service, prepared, call, stream=False)) as steps:
        async for step in steps:
            last = step
    assert last is not None
    answer = last.answer
    content: list[dict[str, Any]] = []
    if answer.reasoning:
        content.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
    if answer.text:
        content.append({"type": "text", "text": answer.text})
    for name, arguments in answer.calls:
        content.append({"type": "tool_use", "id": _tool_id(), "name": name, "input": _input(arguments)})
    missing = shapes.unenforced(last.output.coverage)
    told = {"unenforced": missing} if missing else {}
    return {**_frame(service, call, answer), "content": content, **_end(answer), **told}


async def _stream(service: Service, prepared: PreparedTurn, call: Call) -> AsyncGenerator[bytes, None]:
    blocks = _Blocks()
    last: run.Progress | None = None
    async with aclosing(run.progress(service, prepared, call, stream=True)) as steps:
        async for step in steps:
            if last is None:
                begun = _frame(service, call, step.answer)
                frame = {**begun, "content": [], "stop_reason": None, "stop_sequence": None}
                yield event({"type": "message_start", "message": frame}, name="message_start")
            last = step
            for part in step.parts:
                for data in blocks.add(part):
                    yield event(data, name=data["type"])
    assert last is not None
    answer = last.answer
    for data in blocks.close():
        yield event(data, name=data["type"])
    end = _end(answer)
    missing = shapes.unenforced(last.output.coverage)
    told = {"unenforced": missing} if missing else {}
    yield event({"type": "message_delta", "delta": end, "usage": _usage(answer), **told}, name="message_delta")
    yield event({"type": "message_stop"}, name="message_stop")


class _Blocks:
    """The stream's blocks: one open at a time."""

    def __init__(self) -> None:
        self._index = -1
        self._kind = ""

    def add(self, part: Part) -> list[dict[str, Any]]:
        match part:
            case Text(text):
                return [*self._open("text", {"type": "text", "text": ""}), self._delta("text_delta", "text", text)]
            case Reasoning(text):
                block = {"type": "thinking", "thinking": "", "signature": ""}
                return [*self._open("thinking", block), self._delta("thinking_delta", "thinking", text)]
            case ToolStart(_, name):
                block = {"type": "tool_use", "id": _tool_id(), "name": name, "input": {}}
                return self._open("tool_use", block, again=True)
            case ToolArguments(_, text):
                return [self._delta("input_json_delta", "partial_json", text)]

    def close(self) -> list[dict[str, Any]]:
        if not self._kind:
            return []
        self._kind = ""
        return [{"type": "content_block_stop", "index": self._index}]

    def _open(self, kind: str, block: dict[str, Any], *, again: bool = False) -> list[dict[str, Any]]:
        if kind == self._kind and not again:
            return []
        closed = self.close()
        self._index += 1
        self._kind = kind
        return [*closed, {"type": "content_block_start", "index": self._index, "content_block": block}]

    def _delta(self, kind: str, field: str, text: str) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": {"type": kind, field: text}}


def _frame(service: Service, call: Call, answer: Answer) -> dict[str, Any]:
    return {
        "id": f"msg_{call.record.request_id}",
        "type": "message",
        "role": "assistant",
        "model": service.model_name,
        "usage": _usage(answer),
    }


def _usage(answer: Answer) -> dict[str, int]:
    """Anthropic counts cached input apart from the rest."""
    usage = answer.usage
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
    }


def _end(answer: Answer) -> dict[str, Any]:
    if answer.finish_reason is FinishReason.LENGTH:
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if answer.calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if isinstance(answer.matched_stop, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.matched_stop}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _input(arguments: str) -> Any:
    try:
        return json.loads(arguments or "{}")
    except ValueError:  # cut by max_tokens, which stop_reason says
        return {}


def _tool_id() -> str:
    return f"toolu_{secrets.token_hex(12)}"
