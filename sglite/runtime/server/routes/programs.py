"""/programs/calls: what programs that run elsewhere ask for, whose state is kept beside the engine (sessions.py).

A body is one ProgramFrame: all that the client's programs ask for at one moment. The answer is a stream of frames, each
the length of what follows (four bytes, little endian) and a list of CallAnswers: all that is new at one moment.
Bodies and answers are the structs of sglite.protocol as msgpack: both ends are sglite's.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from sglite.errors import InvalidRequest, SgliteError
from sglite.protocol import (
    CallAnswer,
    GenerateRequest,
    ProgramCall,
    ProgramFrame,
    RequestOutput,
    ScoreRequest,
)
from sglite.runtime.server import convert
from sglite.runtime.server.deps import this_call, this_service
from sglite.runtime.server.errors import error_body, hidden
from sglite.runtime.server.service import Call, Service
from sglite.runtime.server.sessions import Output, ProgramSession, RunningCall
from sglite.runtime.server.sse import EventStream

T = TypeVar("T")
PATH = "/programs/calls"
ALL = -1  # ProgramCall.keep

router = APIRouter(include_in_schema=False)

_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_frames = msgspec.msgpack.Decoder(ProgramFrame)
_calls = msgspec.msgpack.Decoder(ProgramCall)
_encode = msgspec.msgpack.Encoder().encode


async def make_calls(request: Request) -> Response:
    """Make calls, or follow those that were made before a connection broke."""
    service, call = await this_service(request), await this_call(request)
    frame = _decoded(_frames, await request.body())
    for program, rid in frame.given_up:
        session = service.program_sessions.find(call.tenant.owned(program))
        if session is not None and rid in session.calls:
            session.calls.pop(rid).cancel()
    for program in frame.ended:
        ended = service.program_sessions.drop(call.tenant.owned(program))
        if ended is not None:
            await _end(service, ended)
    answers = Answers()
    for number, encoded in enumerate(frame.calls):
        try:
            wanted = _decoded(_calls, encoded)
            session, running = await _running(service, wanted, call)
        except SgliteError as error:
            answers.refuse(number, error)
        else:
            answers.follow(number, session, running, wanted.after)
    return EventStream(answers.frames(), media_type="application/msgpack")


router.add_route(PATH, make_calls, methods=["POST"], include_in_schema=False)  # a step may wait: no more than is needed


@dataclass(eq=False, slots=True)
class _Followed:
    number: int
    session: ProgramSession
    running: RunningCall
    sent: int  # outputs
    changed: Callable[[], None]


class Answers:
    """The answers to one frame."""

    def __init__(self) -> None:
        self._followed: dict[int, _Followed] = {}  # calls that are not over
        self._ready: list[CallAnswer] = []
        self._news: dict[int, None] = {}
        self._event = asyncio.Event()

    def refuse(self, number: int, error: Exception) -> None:
        self._ready.append(CallAnswer(number, over=True, error=_told(error)))
        self._event.set()

    def follow(self, number: int, session: ProgramSession, running: RunningCall, after: int) -> None:
        changed = partial(self._changed, number)
        self._followed[number] = _Followed(number, session, running, after, changed)

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Until all calls are over. What comes within one turn of the event loop goes in one frame."""
        for followed in self._followed.values():  # here, and not before: a generator that never begins is never closed
            followed.session.followers += 1
            followed.running.follow(followed.changed)
            if followed.running.over or len(followed.running.outputs) > followed.sent:
                followed.changed()
        try:
            while self._followed or self._ready:
                await self._event.wait()
                self._event.clear()
                news, self._news = self._news, {}
                for number in news:
                    self._collect(self._followed[number])
                found, self._ready = self._ready, []
                if found:
                    data = _encode(found)
                    yield len(data).to_bytes(4, "little") + data
        finally:
            for followed in list(self._followed.values()):
                self._leave(followed)

    def _changed(self, number: int) -> None:
        self._news[number] = None
        self._event.set()

    def _collect(self, followed: _Followed) -> None:
        running = followed.running
        outputs = running.outputs[followed.sent :]
        followed.sent += len(outputs)
        for place, output in enumerate(outputs, 1):
            over = running.over and running.error is None and place == len(outputs)
            self._ready.append(_answer(followed.number, output, over=over))
        if running.over:
            self._leave(followed)
            if running.error is not None or not outputs:
                error = None if running.error is None else _told(running.error)
                self._ready.append(CallAnswer(followed.number, over=True, error=error))

    def _leave(self, followed: _Followed) -> None:
        del self._followed[followed.number]
        followed.session.followers -= 1
        followed.session.touched = time.monotonic()
        followed.running.unfollow(followed.changed)


def _answer(number: int, output: Output, *, over: bool) -> CallAnswer:
    if isinstance(output, RequestOutput):
        return CallAnswer(number, over=over, generated=output)
    return CallAnswer(number, over=over, scored=output)


def _told(error: Exception) -> dict[str, Any]:
    shown = hidden(error)
    retry_after = getattr(shown, "retry_after", None)
    more = {} if retry_after is None else {"retry_after": retry_after}
    return {**error_body(shown, PATH)["error"], "status": shown.status, **more}


def _session(service: Service, engine_id: str) -> ProgramSession:
    ending: set[asyncio.Task[None]] = set()

    def expired(session: ProgramSession) -> None:
        task = asyncio.ensure_future(_end(service, session))
        ending.add(task)
        task.add_done_callback(ending.discard)

    return service.program_sessions.session(engine_id, expired)


async def _end(service: Service, session: ProgramSession) -> None:
    for call in session.calls.values():  # or a row that one of them holds would be released before it is held
        await call.ended()
    for row in list(session.held):
        await _release(service, session, row)
    await service.engine.end_program(session.engine_id)


async def _release(service: Service, session: ProgramSession, row: str) -> None:
    if row in session.held:
        session.held.discard(row)
        await service.engine.release(row)


async def _running(service: Service, wanted: ProgramCall, call: Call) -> tuple[ProgramSession, RunningCall]:
    """Raises InvalidRequest for a call that cannot be made."""
    source = _source(wanted)
    rid = _checked_id(source.request_id)
    program = _checked_id("" if source.program is None else source.program.program_id)
    session = _session(service, call.tenant.owned(program))
    for row in wanted.released:
        await _release(service, session, call.tenant.owned(row))
    known = session.calls.get(rid)
    if known is not None:
        return session, known
    if wanted.after:
        raise InvalidRequest(f"the server does not know call {rid!r} (any more)", param="after")
    whole = _whole(session, wanted, source)
    if isinstance(source, GenerateRequest):
        check(source, service)
    outputs = _outputs(service, session, source, wanted, whole, rid, call)
    if source.hold:
        session.held.add(call.tenant.owned(rid))
    running = RunningCall(outputs, partial(service.program_sessions.keep, session, rid), whole)
    session.calls[rid] = running
    session.forget_calls()
    return session, running


def _whole(
    session: ProgramSession, wanted: ProgramCall, source: GenerateRequest | ScoreRequest
) -> Callable[[], tuple[int, ...]]:
    """The whole prompt; behind a call that runs it is known when that is over. Raises InvalidRequest."""
    if not isinstance(source.prompt, tuple):
        raise InvalidRequest("a program's call takes token ids", param="prompt")
    whole = partial(session.prompt, wanted.base, wanted.keep, source.prompt)
    leader = session.calls.get(wanted.base) if wanted.base is not None and wanted.keep == ALL else None
    if leader is not None and not leader.over:
        return whole
    prompt = whole()
    return lambda: prompt


async def _outputs(
    service: Service,
    session: ProgramSession,
    source: GenerateRequest | ScoreRequest,
    wanted: ProgramCall,
    whole: Callable[[], tuple[int, ...]],
    rid: str,
    call: Call,
) -> AsyncGenerator[Output, None]:
    """Of a row that the engine keeps, else of the whole prompt."""
    assert source.program is not None
    ref = msgspec.structs.replace(service.programs.ref(call.tenant, source.program), program_id=session.engine_id)
    source = msgspec.structs.replace(source, program=ref, priority=max(0, source.priority))
    row = call.tenant.owned(wanted.base) if source.continue_from is not None and wanted.base is not None else None
    if row is not None and row in session.held:
        follows = wanted.keep == ALL  # others may, too: the client says when none will
        continued = msgspec.structs.replace(source, continue_from=row, keep=None if follows else wanted.keep)
        try:
            async with aclosing(_carried_out(service, continued, rid, call)) as outputs:
                async for output in outputs:
                    yield output
            return
        except InvalidRequest as error:
            if error.param != "continue_from":
                raise
        finally:
            if not follows:
                await _release(service, session, row)
    source = msgspec.structs.replace(source, prompt=whole(), continue_from=None, keep=None)
    async with aclosing(_carried_out(service, source, rid, call)) as outputs:
        async for output in outputs:
            yield output


async def _carried_out(
    service: Service, source: GenerateRequest | ScoreRequest, rid: str, call: Call
) -> AsyncGenerator[Output, None]:
    if isinstance(source, ScoreRequest):
        yield msgspec.structs.replace(await service.score(source, call, rid=rid), request_id=rid)
        return
    async with aclosing(service.outputs(source, call, rid=rid)) as outputs:
        async for output in outputs:
            yield msgspec.structs.replace(output, request_id=rid)


def _decoded(decoder: msgspec.msgpack.Decoder[T], body: bytes | msgspec.Raw) -> T:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"these are no calls of programs: {error}") from error


def _source(wanted: ProgramCall) -> GenerateRequest | ScoreRequest:
    source = wanted.generate or wanted.score
    if source is None or (wanted.generate is not None and wanted.score is not None):
        raise InvalidRequest("a call either generates or scores", param="generate")
    if wanted.after < 0:
        raise InvalidRequest("after must not be negative", param="after")
    return source


def _checked_id(given: str) -> str:
    if not _ID.fullmatch(given):
        raise InvalidRequest("ids take up to 128 letters, digits and . _ : -", param="request_id")
    return given


def check(request: GenerateRequest, service: Service) -> None:
    limits, params = service.config.limits, request.sampling_params
    convert.at_most("n", params.n, limits.max_n)
    convert.at_most("logprobs", params.logprobs or 0, limits.max_logprobs)
    convert.at_most("prompt_logprobs", params.prompt_logprobs or 0, limits.max_logprobs)
    convert.at_most("the number of logit_bias entries", len(params.logit_bias or ()), limits.max_logit_bias)
    convert.at_most("the number of stop_token_ids", len(params.stop_token_ids), limits.max_logit_bias)
    convert.stop_texts(params.stop, limits)
    convert.stop_texts(params.stop_regex, limits, param="stop_regex")
    if request.grammar is not None:
        convert.check_size(request.grammar.kind, request.grammar.source, limits)
