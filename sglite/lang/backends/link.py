"""The way of programs' calls to an sglite server: all that an event loop's programs ask for at one moment is a request.

    calls made in one turn of the event loop ----> POST /programs/calls, one body
    their answers                             <---- one stream: a frame for each moment in which there is something new

So the calls of a fork, or of a batch whose programs go on together, cost one request. Calls belong to their programs
on the server and not to a connection: when one breaks, what is open is asked for again and goes on behind what has
come.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from sglite.errors import BackendError, SgliteError
from sglite.lang.backends.http import Http, Unreachable, error_of, known_shape
from sglite.protocol import CallAnswer, ProgramCall, ProgramFrame

PATH = "/programs/calls"
RETRIES = 6  # after a broken connection, with pauses of 0.1, 0.2, ... s between them
MAX_FRAME_BYTES = 1 << 20  # of several calls together; the server takes a few MiB
_ENDS_S = 0.02  # ends of programs wait that long for a call to go with
_MAX_ANSWER_BYTES = 1 << 30

_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(list[CallAnswer])


class OpenCall:
    """A call that is on its way, for the one that reads its answers."""

    def __init__(self, call: ProgramCall) -> None:
        assert (call.generate or call.score) is not None
        self.call = call
        self.got = 0  # answers, not counting errors
        self.over = False
        self._answers: deque[CallAnswer | SgliteError] = deque()
        self._waiter: asyncio.Future[None] | None = None

    async def next(self) -> CallAnswer:
        """Raises the error that ended the call."""
        while not self._answers:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        answer = self._answers.popleft()
        if isinstance(answer, SgliteError):
            raise answer
        return answer

    def feed(self, answer: CallAnswer) -> None:
        if answer.error is not None:
            self.fail(_error(answer.error))
            return
        if answer.generated is None and answer.scored is None:
            self.fail(BackendError("the server ended the stream without an answer"))
            return
        self.got += 1
        self.over = self.over or answer.over
        self._put(answer)

    def fail(self, error: SgliteError) -> None:
        self.over = True
        self._put(error)

    def _put(self, answer: CallAnswer | SgliteError) -> None:
        self._answers.append(answer)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    @property
    def name(self) -> tuple[str, str]:
        """Its program's id and its own."""
        request = self.call.generate or self.call.score
        assert request is not None and request.program is not None
        return request.program.program_id, request.request_id


class Link:
    """Of one event loop, on which all methods are called."""

    def __init__(self, http: Http) -> None:
        self._http = http
        self._waiting: list[OpenCall] = []
        self._given_up: list[tuple[str, str]] = []
        self._ended: list[str] = []
        self._due: asyncio.Handle | None = None
        self._soon = False
        self._frames: set[asyncio.Task[None]] = set()  # the event loop itself keeps no task

    def send(self, call: ProgramCall) -> OpenCall:
        made = OpenCall(call)
        self._waiting.append(made)
        self._flush_soon()
        return made

    def give_up(self, call: OpenCall) -> None:
        """Nobody reads it any more."""
        if call.over:
            return
        call.over = True
        if call in self._waiting:
            self._waiting.remove(call)
        else:
            self._given_up.append(call.name)
            self._flush_soon()

    def end(self, program_id: str) -> None:
        self._ended.append(program_id)
        if self._due is None:
            self._due = asyncio.get_running_loop().call_later(_ENDS_S, self.flush)

    def flush(self) -> None:
        """Send what waits."""
        if self._due is not None:
            self._due.cancel()
        self._due, self._soon = None, False
        calls, self._waiting = self._waiting, []
        given_up, self._given_up = self._given_up, []
        ended, self._ended = self._ended, []
        for number, part in enumerate(_parts(calls)):
            first = number == 0
            self._begin(self._carry(part, given_up if first else [], ended if first else []))

    def _flush_soon(self) -> None:
        """In the next turn of the loop: until then others may come."""
        if self._soon:
            return
        if self._due is not None:
            self._due.cancel()
        self._due, self._soon = asyncio.get_running_loop().call_soon(self.flush), True

    def _begin(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._frames.add(task)
        task.add_done_callback(self._frames.discard)

    async def _carry(
        self, calls: Sequence[tuple[OpenCall, bytes]], given_up: list[tuple[str, str]], ended: list[str]
    ) -> None:
        """One frame to its end. Errors go to the calls."""
        body = _frame([encoded for _, encoded in calls], given_up, ended)
        open_calls = [call for call, _ in calls]
        failures = 0
        while True:
            reader = _Reader(open_calls)
            try:
                await self._http.pour(PATH, body, reader.feed, closing=not calls)
                open_calls = [call for call in open_calls if not call.over]
                if not open_calls:
                    return
                raise Unreachable("the server ended the answer before the calls were over")
            except Unreachable as error:
                failures = 1 if reader.got else failures + 1
                open_calls = [call for call in open_calls if not call.over]
                if failures > RETRIES or not (open_calls or given_up or ended):
                    _fail(open_calls, error)
                    return
                await asyncio.sleep(0.1 * failures)
                body = _frame([_encode(_again(call)) for call in open_calls], given_up, ended)
            except SgliteError as error:
                _fail([call for call in open_calls if not call.over], error)
                return
            except BaseException:  # the program loop ends: whoever waits for these is cancelled as well
                _fail([call for call in open_calls if not call.over], BackendError("the connection was given up"))
                raise


def _fail(calls: Iterable[OpenCall], error: SgliteError) -> None:
    for call in calls:
        call.fail(error)


def _again(call: OpenCall) -> ProgramCall:
    return msgspec.structs.replace(call.call, after=call.got, released=())


def _parts(calls: Sequence[OpenCall]) -> list[list[tuple[OpenCall, bytes]]]:
    """Frames that the server takes; one at least."""
    found: list[list[tuple[OpenCall, bytes]]] = [[]]
    size = 0
    for call in calls:
        encoded = _encode(call.call)
        if found[-1] and size + len(encoded) > MAX_FRAME_BYTES:
            found.append([])
            size = 0
        found[-1].append((call, encoded))
        size += len(encoded)
    return found


def _frame(calls: Sequence[bytes], given_up: list[tuple[str, str]], ended: list[str]) -> bytes:
    raw = tuple(msgspec.Raw(call) for call in calls)
    return _encode(ProgramFrame(calls=raw, given_up=tuple(given_up), ended=tuple(ended)))


class _Reader:
    """Hands answers to their calls, from the bytes of a stream. Raises BackendError for what is no answer."""

    def __init__(self, calls: Sequence[OpenCall]) -> None:
        self.got = 0  # answers
        self._calls = calls
        self._data = bytearray()

    def feed(self, data: bytes) -> None:
        self._data += data
        while len(self._data) >= 4:
            end = 4 + int.from_bytes(self._data[:4], "little")
            if end > _MAX_ANSWER_BYTES:
                raise BackendError("the server's answer is in an unknown shape")
            if len(self._data) < end:
                return
            with known_shape():
                found = _decoder.decode(self._data[4:end])
            del self._data[:end]
            for answer in found:
                self._hand_over(answer)

    def _hand_over(self, answer: CallAnswer) -> None:
        self.got += 1
        if not 0 <= answer.call < len(self._calls):
            raise BackendError("the server answered a call that was not made")
        call = self._calls[answer.call]
        if not call.over:
            call.feed(answer)


def _error(told: dict[str, Any]) -> SgliteError:
    status, retry_after = told.get("status"), told.get("retry_after")
    return error_of(
        told,
        status=status if isinstance(status, int) else 500,
        retry_after=float(retry_after) if isinstance(retry_after, int | float) else 1.0,
    )
