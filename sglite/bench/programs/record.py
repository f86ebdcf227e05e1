"""A client that lets everything through and writes down what it was: the trace that the numbers are made from."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from sglite.protocol import (
    Coverage,
    GenerateRequest,
    GrammarSpec,
    RequestOutput,
    ScoreOutput,
    ScoreRequest,
    Timing,
    Usage,
)
from sglite.runtime.async_engine import Engine


@dataclass(frozen=True, slots=True)
class Call:
    """One request that was answered. Moments are time.monotonic() seconds, here and in `timing`. What continues a
    request that had not ended counts as submitted at that one's end."""

    program: str
    submitted: float
    finished: float
    prompt: tuple[int, ...]
    answers: tuple[tuple[int, ...], ...]  # what was generated, or the options that were scored
    generates: bool
    usage: Usage
    timing: Timing


@dataclass(frozen=True, slots=True)
class Warmed:
    """Tokens that were computed ahead, sometime between these moments."""

    submitted: float
    finished: float
    tokens: tuple[int, ...]


class Recorder:
    """Satisfies `sglite.lang.client.Client`, and `ServedEngine`: it may stand between a server and its engine."""

    takes_followers = True

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tokenizer = engine.tokenizer
        self.model_info = engine.model_info
        self.facts = engine.facts
        self.calls: list[Call] = []
        self._known: dict[str, tuple[int, ...]] = {}  # what rows hold, by the request that made them
        self.warmed: list[Warmed] = []
        self._ends: dict[str, float] = {}  # of requests that may be continued

    @property
    def alive(self) -> bool:
        return self.engine.alive

    def after_you(self) -> None:
        self.engine.after_you()

    async def stats_async(self) -> dict[str, Any]:
        return await self.engine.stats_async()

    def taken(self) -> tuple[list[Call], list[Warmed]]:
        """What was written down so far. It is forgotten here."""
        calls, warmed, self.calls, self.warmed = self.calls, self.warmed, [], []
        self._known.clear()
        self._ends.clear()
        return calls, warmed

    async def stream_request(self, request: GenerateRequest, *, program: str = "") -> AsyncGenerator[RequestOutput]:
        submitted = time.monotonic()
        prompt: tuple[int, ...] = ()
        ids: list[int] = []
        async with aclosing(self.engine.stream_request(request)) as outputs:
            async for output in outputs:
                prompt = output.prompt_token_ids or prompt
                ids += output.token_ids
                if output.timing is not None:
                    if request.hold:
                        self._known[request.request_id] = (*prompt, *ids)
                    self._keep(request, program, submitted, prompt, (tuple(ids),), True, output)
                yield output

    async def score_request(self, request: ScoreRequest, *, program: str = "") -> ScoreOutput:
        submitted = time.monotonic()
        output = await self.engine.score_request(request)
        assert not isinstance(request.prompt, str)
        before = self._known[request.continue_from][: request.keep] if request.continue_from is not None else ()
        prompt, options = (*before, *request.prompt), request.continuations
        if request.hold:
            self._known[request.request_id] = prompt
        self._keep(request, program, submitted, prompt, options, False, output)
        return output

    def _keep(
        self,
        request: GenerateRequest | ScoreRequest,
        program: str,
        submitted: float,
        prompt: tuple[int, ...],
        answers: tuple[tuple[int, ...], ...],
        generates: bool,
        output: RequestOutput | ScoreOutput,
    ) -> None:
        assert output.timing is not None
        now = time.monotonic()
        submitted = max(submitted, self._ends.get(request.continue_from or "", 0.0))
        if request.hold:
            self._ends[request.request_id] = now
        self.calls.append(
            Call(_program(request, program), submitted, now, prompt, answers, generates, output.usage, output.timing)
        )

    async def compile_grammar(self, spec: GrammarSpec) -> Coverage:
        return await self.engine.compile_grammar(spec)

    async def warm_prefix(self, token_ids: tuple[int, ...], *, namespace: str = "", lease_s: float = 60.0) -> int:
        submitted = time.monotonic()
        kept = await self.engine.warm_prefix(token_ids, namespace=namespace, lease_s=lease_s)
        self.warmed.append(Warmed(submitted, time.monotonic(), token_ids[:kept]))
        return kept

    async def abort(self, request_id: str) -> None:
        await self.engine.abort(request_id)

    async def release(self, request_id: str) -> None:
        await self.engine.release(request_id)

    async def end_program(self, program_id: str) -> None:
        await self.engine.end_program(program_id)

    async def flush_cache(self) -> bool:
        return await self.engine.flush_cache()


def _program(request: Any, given: str) -> str:
    """Calls over HTTP that name no program tell it in their request's id: TENANT:PROGRAM.NUMBER#..."""
    if request.program is not None:
        return request.program.program_id
    return given or request.request_id.partition(":")[2].partition(".")[0]
