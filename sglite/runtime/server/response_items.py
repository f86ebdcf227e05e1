"""The output items of /v1/responses, built from an answer's parts: the stream's events and the whole are one thing."""

from __future__ import annotations

import secrets
from typing import Any

from sglite.runtime.server.chat.parts import Part, Reasoning, Text, ToolArguments, ToolStart

Event = dict[str, Any]


class ResponseItems:
    """Takes parts in order. `items` is the output so far; what `add` and `close` return are the stream's events."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._logprobs: list[Any] = []  # of tokens whose text has not come yet

    def note_logprobs(self, entries: list[Any]) -> None:
        """Of the tokens that the next parts are made of. Those of other parts than text are dropped."""
        self._logprobs += entries

    def add(self, part: Part) -> list[Event]:
        entries, self._logprobs = self._logprobs, []
        match part:
            case Text(text):
                events = self._enter("message")
                assert self._open is not None
                content = self._open["content"][0]
                content["text"] += text
                content["logprobs"] += entries
                return [*events, self._event("output_text.delta", content_index=0, delta=text, logprobs=entries)]
            case Reasoning(text):
                events = self._enter("reasoning")
                assert self._open is not None
                self._open["content"][0]["text"] += text
                return [*events, self._event("reasoning_text.delta", content_index=0, delta=text)]
            case ToolStart(_, name):
                events = self.close()
                return [*events, *self._begin(_function_call(name))]
            case ToolArguments(_, text):
                assert self._open is not None
                self._open["arguments"] += text
                return [self._event("function_call_arguments.delta", delta=text)]

    def close(self, *, complete: bool = True) -> list[Event]:
        """End the open item."""
        item, events = self._open, []
        if item is None:
            return []
        item["status"] = "completed" if complete else "incomplete"
        match item["type"]:
            case "function_call":
                events.append(
                    self._event("function_call_arguments.done", arguments=item["arguments"], name=item["name"])
                )
            case "message":
                part = item["content"][0]
                done = {"text": part["text"], "logprobs": part["logprobs"]}
                events.append(self._event("output_text.done", content_index=0, **done))
                events.append(self._event("content_part.done", content_index=0, part=dict(part)))
            case "reasoning":
                part = item["content"][0]
                events.append(self._event("reasoning_text.done", content_index=0, text=part["text"]))
                events.append(self._event("content_part.done", content_index=0, part=dict(part)))
        events.append({"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": _copy(item)})
        self._open = None
        return events

    def _enter(self, kind: str) -> list[Event]:
        """Open an item of this kind unless one is open."""
        if self._open is not None and self._open["type"] == kind:
            return []
        events = self.close()
        item = _reasoning() if kind == "reasoning" else _message()
        part = item["content"][0]
        shown = {name: list(value) if isinstance(value, list) else value for name, value in part.items()}
        return [*events, *self._begin(item), self._event("content_part.added", content_index=0, part=shown)]

    def _begin(self, item: dict[str, Any]) -> list[Event]:
        self.items.append(item)
        self._open = item
        shown = {**item, "content": []} if "content" in item else dict(item)
        return [{"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": shown}]

    def _event(self, kind: str, /, **fields: Any) -> Event:
        assert self._open is not None
        place = {"item_id": self._open["id"], "output_index": len(self.items) - 1}
        return {"type": f"response.{kind}", **place, **fields}


def _message() -> dict[str, Any]:
    part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    return {"id": _id("msg"), "type": "message", "role": "assistant", "status": "in_progress", "content": [part]}


def _reasoning() -> dict[str, Any]:
    part = {"type": "reasoning_text", "text": ""}
    return {"id": _id("rs"), "type": "reasoning", "status": "in_progress", "summary": [], "content": [part]}


def _function_call(name: str) -> dict[str, Any]:
    ids = {"id": _id("fc"), "call_id": _id("call")}
    return {**ids, "type": "function_call", "name": name, "arguments": "", "status": "in_progress"}


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    """As it is now: events are encoded later than they are made."""
    content = item.get("content")
    return {**item, "content": [dict(part) for part in content]} if content is not None else dict(item)


def _id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"
