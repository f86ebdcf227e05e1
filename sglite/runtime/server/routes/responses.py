"""POST /v1/responses: text, JSON schema, function tools, streaming. Nothing is stored between requests."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import Request
from starlette.responses import Response

from sglite.errors import InvalidRequest, SgliteError
from sglite.protocol import FinishReason, GrammarSpec
from sglite.runtime.server import convert
from sglite.runtime.server import openai_shapes as shapes
from sglite.runtime.server.body import make_router
from sglite.runtime.server.chat import run
from sglite.runtime.server.chat.tools import Tool, ToolChoice
from sglite.runtime.server.chat.turn import Answer, PreparedTurn, Turn
from sglite.runtime.server.config import Limits
from sglite.runtime.server.deps import CallDep, ServiceDep
from sglite.runtime.server.errors import hidden, openai_error
from sglite.runtime.server.response_items import Event, ResponseItems
from sglite.runtime.server.routes.chat import arguments_object
from sglite.runtime.server.schemas.responses import InputItem, ResponsesRequest, ResponseToolChoice
from sglite.runtime.server.service import Call, Service
from sglite.runtime.server.sse import EventStream, Primed, event, json_response, primed, while_connected

router = make_router()


@router.post("/v1/responses")
async def responses(body: ResponsesRequest, request: Request, service: ServiceDep, call: CallDep) -> Response:
    """Complete a conversation, in the shapes of OpenAI's responses."""
    service.check_model(body.model)
    prepared = await run.prepare(service, _turn(body, service.config.limits))
    frame = _frame(service, call, body)
    if body.stream:
        steps = await while_connected(request, primed(run.progress(service, prepared, call, stream=True)))
        return EventStream(_stream(service, steps, frame))
    return json_response(await while_connected(request, _whole(service, prepared, call, frame)))


def _turn(body: ResponsesRequest, limits: Limits) -> Turn:
    _refuse(body)
    convert.check_metadata(body, limits)
    if not isinstance(body.input, str):
        convert.at_most("the number of input items", len(body.input), limits.max_messages, param="input")
    tools = _tools(body, limits)
    choice = body.tool_choice
    named = choice.name if isinstance(choice, ResponseToolChoice) else None
    if isinstance(choice, ResponseToolChoice) and (choice.type != "function" or not named):
        raise InvalidRequest("tool_choice can name a function only", param="tool_choice")
    effort = body.reasoning.effort if body.reasoning else None
    return Turn(
        messages=_history(body),
        sampling=convert.sampling(body, limits, max_tokens=body.max_output_tokens, logprobs=_logprobs(body)),
        tools=tools,
        tool_choice=convert.tool_choice(
            "named" if named else choice, name=named, parallel=body.parallel_tool_calls, any_tools=bool(tools)
        )
        if tools or choice is not None
        else ToolChoice("none"),
        answer=_answer(body, limits),
        thinking=False if effort in ("none", "minimal") else None,
        think_budget=body.thinking_budget,
        close_on_budget=body.close_on_budget,
        jump_forward=body.jump_forward,
        truncate_prompt=body.truncate_prompt,
        drop_oldest=body.truncation == "auto",
    )


def _logprobs(body: ResponsesRequest) -> int | None:
    if body.top_logprobs is None and "message.output_text.logprobs" not in (body.include or ()):
        return None
    return body.top_logprobs or 0


def _refuse(body: ResponsesRequest) -> None:
    for name in ("previous_response_id", "conversation"):
        if getattr(body, name) is not None:
            raise InvalidRequest(f"{name}: nothing is stored here; send the whole conversation as input", param=name)
    if body.background:
        raise InvalidRequest("background responses are not supported", param="background")
    if body.n not in (None, 1):
        raise InvalidRequest("a response has one answer; n is not supported", param="n")
    if body.max_tool_calls is not None:
        raise InvalidRequest("max_tool_calls is not supported; use parallel_tool_calls", param="max_tool_calls")


def _tools(body: ResponsesRequest, limits: Limits) -> tuple[Tool, ...]:
    convert.at_most("the number of tools", len(body.tools or ()), limits.max_tools, param="tools")
    found: list[Tool] = []
    for tool in body.tools or ():
        if tool.type != "function" or tool.name is None:
            raise InvalidRequest(f"tools of type {tool.type[:40]!r} do not run here; declare functions", param="tools")
        parameters = tool.parameters or {"type": "object", "properties": {}}
        convert.check_size("tools", parameters, limits)
        found.append(Tool(tool.name, parameters, tool.description or "", tool.strict))
    return tuple(found)


def _answer(body: ResponsesRequest, limits: Limits) -> GrammarSpec | None:
    own = convert.constraint(body, None, limits)
    form = body.text.format if body.text else None
    if form is None or form.type == "text":
        return own
    if own is not None:
        raise InvalidRequest("only one constraint at a time", param="text.format")
    if form.type == "json_object":
        return convert.json_object(body)
    return convert.json_schema_answer(
        form.schema_, limits, strict=form.strict, on_unsupported=body.on_unsupported, whitespace=body.whitespace
    )


def _history(body: ResponsesRequest) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if body.instructions:
        found.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*found, {"role": "user", "content": body.input}]
    for item in body.input:
        match item.type:
            case "message":
                role = "system" if item.role == "developer" else item.role or "user"
                found.append({"role": role, "content": _text(item.content)})
            case "function_call":
                found.append(_past_call(item))
            case "function_call_output":
                found.append({"role": "tool", "tool_call_id": item.call_id or "", "content": _text(item.output)})
            case "reasoning":
                continue
            case other:
                raise InvalidRequest(f"an input item of type {other[:40]!r} is not supported", param="input")
    if not found:
        raise InvalidRequest("the input is empty", param="input")
    return found


def _past_call(item: InputItem) -> dict[str, Any]:
    function = {"name": item.name or "", "arguments": arguments_object(item.arguments or "")}
    call = {"id": item.call_id or item.id or "", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _text(content: str | list[dict[str, Any]] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for part in content:
        kind, text = part.get("type"), part.get("text")
        if kind not in ("input_text", "output_text", "text") or not isinstance(text, str):
            raise InvalidRequest(f"this model takes text only; a part of type {str(kind)[:40]!r} is refused")
        texts.append(text)
    return "".join(texts)


def _frame(service: Service, call: Call, body: ResponsesRequest) -> dict[str, Any]:
    form = body.text.format if body.text else None
    choice = body.tool_choice
    return {
        "id": f"resp_{call.record.request_id}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "model": service.model_name,
        "output": [],
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "store": False,
        "temperature": body.temperature,
        "text": {"format": {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)},
        "tool_choice": choice.model_dump(exclude_none=True)
        if isinstance(choice, ResponseToolChoice)
        else choice or "auto",
        "tools": [tool.model_dump(exclude_none=True) for tool in body.tools or ()],
        "top_p": body.top_p,
        "top_logprobs": body.top_logprobs or 0,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
    }


async def _whole(service: Service, prepared: PreparedTurn, call: Call, frame: Mapping[str, Any]) -> dict[str, Any]:
    items = ResponseItems()
    last: run.Progress | None = None
    async with aclosing(run.progress(service, prepared, call, stream=False)) as steps:
        async for step in steps:
            last = step
            grow = partial(_grow, items, service, step)
            await service.prompt_threads.shape(grow, values=sum(1 + len(e.top) for e in step.output.logprobs))
    assert last is not None
    items.close(complete=_complete(last.answer))
    return _end(frame, items, last)


def _grow(items: ResponseItems, service: Service, step: run.Progress) -> list[Event]:
    items.note_logprobs(shapes.chat_logprobs(service.tokenizer, step.output.logprobs))
    return [data for part in step.parts for data in items.add(part)]


async def _stream(
    service: Service, steps: Primed[run.Progress], frame: Mapping[str, Any]
) -> AsyncGenerator[bytes, None]:
    items = ResponseItems()
    last: run.Progress | None = None
    number = 0

    def numbered(data: Mapping[str, Any]) -> bytes:
        nonlocal number
        number += 1
        return event({**data, "sequence_number": number - 1}, name=data["type"])

    async with aclosing(steps):
        yield numbered({"type": "response.created", "response": frame})
        yield numbered({"type": "response.in_progress", "response": frame})
        try:
            async for step in steps:
                last = step
                for data in _grow(items, service, step):
                    yield numbered(data)
        except Exception as error:  # noqa: BLE001 - the status is sent already: the stream is the only way to tell
            yield numbered(_failure(frame, hidden(error)))
            return
    assert last is not None
    for data in items.close(complete=_complete(last.answer)):
        yield numbered(data)
    response = _end(frame, items, last)
    yield numbered({"type": f"response.{response['status']}", "response": response})


def _failure(frame: Mapping[str, Any], error: SgliteError) -> dict[str, Any]:
    told = openai_error(error)["error"]
    failed = {**frame, "status": "failed", "error": {"code": "server_error", "message": told["message"]}}
    return {"type": "response.failed", "response": failed}


def _complete(answer: Answer) -> bool:
    return answer.finish_reason in (FinishReason.STOP, FinishReason.GRAMMAR)


def _end(frame: Mapping[str, Any], items: ResponseItems, last: run.Progress) -> dict[str, Any]:
    answer = last.answer
    usage = answer.usage
    reasons = {FinishReason.LENGTH: "max_output_tokens"}
    missing = shapes.unenforced(last.output.coverage)
    return {
        **frame,
        "status": "completed" if _complete(answer) else "incomplete",
        "incomplete_details": None
        if _complete(answer)
        else {"reason": reasons.get(answer.finish_reason, str(answer.finish_reason))},  # type: ignore[arg-type]
        "output": items.items,
        "usage": {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {
                "reasoning_tokens": answer.reasoning_tokens,
                "forced_tokens": usage.forced_tokens,
            },
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        },
        **({"unenforced": missing} if missing else {}),
    }
