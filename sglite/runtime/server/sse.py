"""Answers over one HTTP exchange that may break at any time: streams of server-sent events, and plain ones watched."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, Generic, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sglite.errors import RequestAborted
from sglite.runtime.server.errors import error_body, hidden

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
NAMED_EVENTS = ("/v1/messages", "/v1/responses")  # APIs whose events have names
_encode = msgspec.json.Encoder().encode


def event(data: Any, *, name: str | None = None) -> bytes:
    """One server-sent event with JSON data."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + _encode(data) + b"\n\n"


class EventStream(Response):
    """Sends what the generator gives. A client that leaves ends the generator at once, also between two events."""

    def __init__(
        self, events: AsyncGenerator[bytes, None] | Primed[bytes], *, media_type: str = "text/event-stream"
    ) -> None:
        self.media_type = media_type
        self.status_code = 200
        self.background = None
        self.body = b""
        self._events = events
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self.raw_headers = [header for header in self.raw_headers if header[0] != b"content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send_all(send))
        await _while_connected(sending, receive)
        with contextlib.suppress(asyncio.CancelledError, OSError):
            await sending

    async def _send_all(self, send: Send) -> None:
        async with contextlib.aclosing(self._events):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for data in self._events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves. Raises RequestAborted then."""
    task = asyncio.ensure_future(work)
    if not await _while_connected(task, request.receive):
        with contextlib.suppress(asyncio.CancelledError):
            await task
        raise RequestAborted("the client left")
    return await task


class Primed(Generic[T]):
    """A generator whose first item has been waited for already, so that an error before it is raised by `primed`."""

    def __init__(self, first: list[T], rest: AsyncGenerator[T, None]) -> None:
        self._first = first
        self._rest = rest

    def __aiter__(self) -> Primed[T]:
        return self

    async def __anext__(self) -> T:
        return self._first.pop() if self._first else await anext(self._rest)

    async def aclose(self) -> None:
        await self._rest.aclose()


async def primed(items: AsyncGenerator[T, None]) -> Primed[T]:
    try:
        return Primed([await anext(items)], items)
    except StopAsyncIteration:
        return Primed([], items)


async def _while_connected(task: asyncio.Future[Any], receive: Receive) -> bool:
    """Waits for the task; cancels it and returns False when the client leaves first."""
    leaving = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        task.cancel()
        raise
    finally:
        leaving.cancel()
    if task.done():
        return True
    task.cancel()
    return False


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def json_response(value: Any) -> Response:
    return Response(_encode(value), media_type="application/json")


async def guarded(events: Primed[bytes], path: str) -> AsyncGenerator[bytes, None]:
    """The events, and in place of an error of the stream's own an event that tells of it."""
    async with contextlib.aclosing(events):
        try:
            async for data in events:
                yield data
        except Exception as error:  # noqa: BLE001 - the status is sent already: the stream is the only way to tell
            body = error_body(hidden(error), path)
            yield event(body, name="error" if path.startswith(NAMED_EVENTS) else None)
