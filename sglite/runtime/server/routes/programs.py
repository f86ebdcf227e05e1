"""/programs: the state of a program that runs elsewhere, kept beside the engine; see sessions.py.

    POST   /programs/{program}/calls          one call: what is new of its prompt -> a stream of its outputs
    DELETE /programs/{program}/calls/{call}   give a call up
    DELETE /programs/{program}                the program is over

Bodies and outputs are the structs of sglite.protocol as JSON: both ends are sglite's.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from sglite.errors import InvalidRequest
from sglite.protocol import GenerateRequest, ProgramCall, ProgramRef, ScoreRequest
from sglite.runtime.server import convert
from sglite.runtime.server.deps import CallDep, ServiceDep, TenantDep
from sglite.runtime.server.service import Call, Service
from sglite.runtime.server.sessions import Output, ProgramSession, RunningCall
from sglite.runtime.server.sse import DONE, EventStream, event, guarded, primed, while_connected

router = APIRouter(include_in_schema=False)

_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_decoder = msgspec.json.Decoder(ProgramCall)


@router.post("/programs/{program}/calls")
async def make_call(program: str, request: Request, service: ServiceDep, call: CallDep) -> Response:
    """Make a call, or follow one that was made before a connection broke."""
    wanted = _decoded(await request.body())
    session = _session(service, call.tenant.owned(_checked_id(program)))
    for row in wanted.released:
        await _release(service, session, call.tenant.owned(row))
    running = _running(service, session, wanted, call)
    events = await while_connected(request, primed(_events(session, running, wanted.after)))
    return EventStream(guarded(events, request.url.path))


@router.delete("/programs/{program}/calls/{number}")
async def give_up(program: str, number: str, service: ServiceDep, tenant: TenantDep) -> dict[str, bool]:
    """Abort a call. A no-op for unknown ones."""
    session = service.program_sessions.find(tenant.owned(program))
    if session is not None and number in session.calls:
        session.calls.pop(number).cancel()
    return {"ok": True}


@router.delete("/programs/{program}")
async def end(program: str, service: ServiceDep, tenant: TenantDep) -> dict[str, bool]:
    """Forget the program. A no-op for unknown ones."""
    session = service.program_sessions.drop(tenant.owned(program))
    if session is not None:
        await _end(service, session)
    return {"ok": True}


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


async def _events(session: ProgramSession, running: RunningCall, after: int) -> AsyncGenerator[bytes, None]:
    session.followers += 1
    try:
        async with aclosing(running.follow(after)) as outputs:
            async for output in outputs:
                yield event(output)
        yield DONE
    finally:
        session.followers -= 1


def _running(service: Service, session: ProgramSession, wanted: ProgramCall, call: Call) -> RunningCall:
    source = wanted.generate or wanted.score
    assert source is not None
    rid = _checked_id(source.request_id)
    known = session.calls.get(rid)
    if known is not None:
        return known
    if wanted.after:
        raise InvalidRequest(f"the server does not know call {rid!r} (any more)", param="after")
    if not isinstance(source.prompt, tuple):
        raise InvalidRequest("a program's call takes token ids", param="prompt")
    whole = session.prompt(wanted.base, wanted.keep, source.prompt)
    if isinstance(source, GenerateRequest):
        check(source, service)
    outputs = _outputs(service, session, source, wanted, whole, rid, call)
    own = call.tenant.owned(rid)
    if source.hold:
        session.held.add(own)

    def finished(ids: tuple[int, ...]) -> None:
        service.program_sessions.keep(session, rid, ids)

    running = session.calls[rid] = RunningCall(outputs, finished, whole)
    session.forget_calls()
    return running


async def _outputs(
    service: Service,
    session: ProgramSession,
    source: GenerateRequest | ScoreRequest,
    wanted: ProgramCall,
    whole: tuple[int, ...],
    rid: str,
    call: Call,
) -> AsyncGenerator[Output, None]:
    """Of a row that the engine keeps, else of the whole prompt."""
    told = ProgramRef(program_id="") if source.program is None else source.program
    ref = msgspec.structs.replace(service.programs.ref(call.tenant, told), program_id=session.engine_id)
    source = msgspec.structs.replace(source, program=ref, priority=max(0, source.priority))
    row = call.tenant.owned(wanted.base) if source.continue_from is not None and wanted.base is not None else None
    if row is not None and row in session.held:
        continued = msgspec.structs.replace(source, continue_from=row, keep=wanted.keep)
        try:
            async with aclosing(_carried_out(service, continued, rid, call)) as outputs:
                async for output in outputs:
                    yield output
            return
        except InvalidRequest as error:
            if error.param != "continue_from":
                raise
        finally:
            await _release(service, session, row)
    source = msgspec.structs.replace(source, prompt=whole, continue_from=None, keep=None)
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


def _decoded(body: bytes) -> ProgramCall:
    try:
        wanted = _decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"this is no call of a program: {error}") from error
    if (wanted.generate is None) == (wanted.score is None):
        raise InvalidRequest("a call either generates or scores", param="generate")
    if wanted.after < 0:
        raise InvalidRequest("after must not be negative", param="after")
    return wanted


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
