"""Programs whose state an sglite server keeps: over the wire goes what is new.

Both sides know what each call of a program read and wrote, as token ids. A call names the earlier call that its prompt
begins with (the one whose row it continues, else the program's last one) and sends the rest. When a connection breaks,
the call is asked for again and goes on behind what has come; when the server does not know it any more, it gets all.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec

from sglite.errors import BackendError, InvalidRequest
from sglite.lang.backends.http import Http, Unreachable, known_shape
from sglite.lang.items import common
from sglite.protocol import GenerateRequest, ProgramCall, RequestOutput, ScoreOutput, ScoreRequest, with_prompt

RETRIES = 6  # after a broken connection, with pauses of 0.1, 0.2, ... s between them
_encode = msgspec.json.Encoder().encode


@dataclass(eq=False)
class _Known:
    """One program: what its calls read and wrote, and rows that nobody will continue."""

    ids: dict[str, tuple[int, ...]] = field(default_factory=dict)
    released: list[str] = field(default_factory=list)


class ServerSessions:
    def __init__(self, http: Http) -> None:
        self._http = http
        self._programs: dict[str, _Known] = {}

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[RequestOutput]:
        """As Client.stream_request. Raises InvalidRequest (param "continue_from") for a row of an unknown call."""
        call, whole = self._call(request)
        ids: list[int] = []
        began = finished = False
        try:
            async with aclosing(self._outputs(request, call, whole)) as outputs:
                async for found in outputs:
                    with known_shape():
                        output = msgspec.convert(found, RequestOutput)
                    if not began:
                        output = with_prompt(output, whole)
                        began, ids = True, list(output.prompt_token_ids)
                    if output.index == 0:
                        ids += output.token_ids
                    finished = finished or output.finished
                    if output.finished:
                        self._known(request).ids[request.request_id] = tuple(ids)
                    yield output
        finally:
            if not finished:
                await self._give_up(request)

    async def score(self, request: ScoreRequest) -> ScoreOutput:
        call, whole = self._call(request)
        found: list[ScoreOutput] = []
        async with aclosing(self._outputs(request, call, whole)) as outputs:
            async for output in outputs:
                with known_shape():
                    found.append(msgspec.convert(output, ScoreOutput))
        if not found:
            raise BackendError("the server ended the stream without an answer")
        self._known(request).ids[request.request_id] = whole
        return found[0]

    def release(self, request_id: str) -> None:
        """The server is told with the next call."""
        for known in self._programs.values():
            if request_id in known.ids:
                known.released.append(request_id)

    async def end(self, program_id: str) -> None:
        if self._programs.pop(program_id, None) is not None:
            await self._http.delete(f"/programs/{program_id}")

    def _known(self, request: GenerateRequest | ScoreRequest) -> _Known:
        assert request.program is not None
        return self._programs.setdefault(request.program.program_id, _Known())

    def _call(self, request: GenerateRequest | ScoreRequest) -> tuple[ProgramCall, tuple[int, ...]]:
        """What is sent, and the whole prompt."""
        assert request.program is not None
        known = self._known(request)
        if isinstance(request.prompt, str):
            raise InvalidRequest("a program's call takes token ids", param="prompt")
        if request.continue_from is not None:
            base, keep = request.continue_from, request.keep
            if base not in known.ids:
                raise InvalidRequest(f"no row of {base!r} is held", param="continue_from")
            keep = len(known.ids[base]) if keep is None else keep
            whole = (*known.ids[base][:keep], *request.prompt)
        else:
            base, whole = request.program.parent, request.prompt
            keep = common(known.ids.get(base or "", ()), whole)
            base = base if keep else None
        released, known.released = tuple(known.released), []
        part = msgspec.structs.replace(request, prompt=whole[keep:] if base else whole)
        return _wrapped(part, base=base, keep=keep if base else 0, released=released), whole

    async def _outputs(
        self, request: GenerateRequest | ScoreRequest, call: ProgramCall, whole: tuple[int, ...]
    ) -> AsyncGenerator[Any]:
        assert request.program is not None
        path = f"/programs/{request.program.program_id}/calls"
        got = failures = 0
        while True:
            try:
                async with aclosing(self._http.events(path, _encode(call))) as events:
                    async for event in events:
                        got, failures = got + 1, 0
                        yield event
                return
            except Unreachable:
                failures += 1
                if failures > RETRIES:
                    raise
                await asyncio.sleep(0.1 * failures)
                call = msgspec.structs.replace(call, after=got, released=())
            except InvalidRequest as error:
                if error.param not in ("base", "after") or got:
                    raise
                # the server was started anew, or has forgotten: it gets the whole prompt
                alone = msgspec.structs.replace(request, prompt=whole, continue_from=None, keep=None)
                if call.base is None and not call.after:
                    raise
                call = _wrapped(alone)

    async def _give_up(self, request: GenerateRequest) -> None:
        assert request.program is not None
        with contextlib.suppress(BackendError):  # where the server is away, the call ends with its session
            await self._http.delete(f"/programs/{request.program.program_id}/calls/{request.request_id}")


def _wrapped(
    request: GenerateRequest | ScoreRequest, *, base: str | None = None, keep: int = 0, released: tuple[str, ...] = ()
) -> ProgramCall:
    if isinstance(request, GenerateRequest):
        return ProgramCall(generate=request, base=base, keep=keep, released=released)
    return ProgramCall(score=request, base=base, keep=keep, released=released)
