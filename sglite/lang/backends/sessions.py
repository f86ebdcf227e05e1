"""Programs whose state an sglite server keeps: over the wire goes what is new.

Both sides know what each call of a program read and wrote, as token ids. A call names the earlier call that its prompt
begins with (the one whose row it continues, else the program's last one) and sends the rest. That one may still run.
When the server does not know it any more, it gets all. link.py says how calls travel.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import msgspec

from sglite.errors import BackendError, InvalidRequest
from sglite.lang.backends.http import Http
from sglite.lang.backends.link import Link, OpenCall
from sglite.lang.items import common
from sglite.protocol import (
    CallAnswer,
    GenerateRequest,
    ProgramCall,
    RequestOutput,
    ScoreOutput,
    ScoreRequest,
    with_prompt,
)

ALL = -1  # ProgramCall.keep


@dataclass(eq=False)
class _Known:
    """One program: what its calls read and wrote, calls that run, and rows that nobody will continue."""

    ids: dict[str, tuple[int, ...]] = field(default_factory=dict)
    running: dict[str, asyncio.Future[None]] = field(default_factory=dict)  # done when a call is over
    released: list[str] = field(default_factory=list)

    def over(self, request_id: str) -> None:
        done = self.running.pop(request_id, None)
        if done is not None and not done.done():
            done.set_result(None)


class ServerSessions:
    def __init__(self, http: Http) -> None:
        self._http = http
        self._programs: dict[str, _Known] = {}
        self._links: WeakKeyDictionary[asyncio.AbstractEventLoop, Link] = WeakKeyDictionary()

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[RequestOutput]:
        """As Client.stream_request. Raises InvalidRequest (param "continue_from") for a row of an unknown call."""
        known = self._known(request)
        asked = _Asked(self._link(), known, request)
        known.running[request.request_id] = asyncio.get_running_loop().create_future()
        ids: list[int] = []
        began, left = False, request.sampling_params.n
        try:
            while left:
                output = (await asked.next()).generated
                if output is None:
                    raise BackendError("the server answered a generation with something else")
                if not began:
                    output = with_prompt(output, await asked.whole())
                    began, ids = True, list(output.prompt_token_ids)
                if output.index == 0:
                    ids += output.token_ids
                    if output.finished:
                        known.ids[request.request_id] = tuple(ids)
                left -= output.finished
                yield output
        finally:
            known.over(request.request_id)
            asked.close()

    async def score(self, request: ScoreRequest) -> ScoreOutput:
        known = self._known(request)
        asked = _Asked(self._link(), known, request)
        known.running[request.request_id] = asyncio.get_running_loop().create_future()
        try:
            output = (await asked.next()).scored
            if output is None:
                raise BackendError("the server answered a scoring with something else")
            known.ids[request.request_id] = await asked.whole()
        finally:
            known.over(request.request_id)
            asked.close()
        return output

    def release(self, request_id: str) -> None:
        """The server is told with the next call."""
        program_id = request_id.partition("-")[0]
        named = self._programs.get(program_id)
        for known in self._programs.values() if named is None else (named,):
            if request_id in known.ids or request_id in known.running:
                known.released.append(request_id)

    async def end(self, program_id: str) -> None:
        if self._programs.pop(program_id, None) is not None:
            self._link().end(program_id)

    def close(self) -> None:
        """Tell the server what it was not told yet, while there is a connection."""
        for loop, link in list(self._links.items()):
            if loop.is_running():
                loop.call_soon_threadsafe(link.flush)

    def _link(self) -> Link:
        loop = asyncio.get_running_loop()
        link = self._links.get(loop)
        if link is None:
            link = self._links[loop] = Link(self._http)
        return link

    def _known(self, request: GenerateRequest | ScoreRequest) -> _Known:
        assert request.program is not None
        return self._programs.setdefault(request.program.program_id, _Known())


class _Asked:
    """One call, made again with its whole prompt where the server does not know what it goes on from."""

    def __init__(self, link: Link, known: _Known, request: GenerateRequest | ScoreRequest) -> None:
        """Raises InvalidRequest."""
        if isinstance(request.prompt, str):
            raise InvalidRequest("a program's call takes token ids", param="prompt")
        self._link, self._known, self._request = link, known, request
        self._prompt = request.prompt
        self._leader: asyncio.Future[None] | None = None  # of a call that has not ended yet
        self._open: OpenCall = link.send(self._first())

    def _first(self) -> ProgramCall:
        request, known = self._request, self._known
        assert request.program is not None
        base, keep = request.continue_from, request.keep
        if base is not None and base not in known.ids and base in known.running and keep is None:
            self._leader = known.running[base]
            return self._call(request, base, ALL)
        if base is not None:
            if base not in known.ids:
                raise InvalidRequest(f"no row of {base!r} is held", param="continue_from")
            keep = len(known.ids[base]) if keep is None else keep
            self._prompt = (*known.ids[base][:keep], *self._prompt)
        else:
            base = request.program.parent
            keep = common(known.ids.get(base or "", ()), self._prompt)
        if not keep:
            return self._call(request, None, 0)
        return self._call(msgspec.structs.replace(request, prompt=self._prompt[keep:]), base, keep)

    def _call(self, request: GenerateRequest | ScoreRequest, base: str | None, keep: int) -> ProgramCall:
        released, self._known.released = tuple(self._known.released), []
        if isinstance(request, GenerateRequest):
            return ProgramCall(generate=request, base=base, keep=keep, released=released)
        return ProgramCall(score=request, base=base, keep=keep, released=released)

    async def next(self) -> CallAnswer:
        """Raises what ended the call."""
        try:
            return await self._open.next()
        except InvalidRequest as error:
            if error.param not in ("base", "after") or self._open.got or self._open.call.base is None:
                raise
        # the server was started anew, or has forgotten: it gets the whole prompt
        prompt = await self.whole()
        alone = msgspec.structs.replace(self._request, prompt=prompt, continue_from=None, keep=None)
        self._open = self._link.send(self._call(alone, None, 0))
        return await self._open.next()

    async def whole(self) -> tuple[int, ...]:
        """The whole prompt. Raises InvalidRequest where its beginning never comes."""
        if self._leader is not None:
            await asyncio.wait((self._leader,))
            base = self._request.continue_from
            if base not in self._known.ids:
                raise InvalidRequest(f"no row of {base!r} is held", param="continue_from")
            self._prompt, self._leader = (*self._known.ids[base], *self._prompt), None
        return self._prompt

    def close(self) -> None:
        """Nobody waits for it any more."""
        self._link.give_up(self._open)
