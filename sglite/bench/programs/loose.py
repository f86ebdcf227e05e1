"""The other way: calls that know nothing of each other, made as well as a client can make them.

Token ids are kept and sent whole with every call, so what was generated is found in the prefix cache again (a client
that sends text has it tokenised anew each time, and may miss). Siblings are sent at once. `select` is one request for
each option. The engine runs in this process: no HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from sglite.bench.programs.record import Recorder
from sglite.protocol import GenerateRequest, GrammarSpec, RequestOutput, SamplingParams, ScoreRequest


class Loose:
    """A text that grows by calls."""

    def __init__(self, recorder: Recorder, program: str, ids: Sequence[int] = ()) -> None:
        self._recorder = recorder
        self._program = program
        self._ids = list(ids)

    def add(self, text: str) -> None:
        self._ids += self._recorder.tokenizer.encode(text)

    def fork(self, size: int) -> list[Loose]:
        return [Loose(self._recorder, self._program, self._ids) for _ in range(size)]

    async def gen(self, sampling: SamplingParams, grammar: GrammarSpec | None = None) -> str:
        request = GenerateRequest(
            request_id=self._recorder.engine.new_request_id(),
            prompt=tuple(self._ids),
            sampling_params=sampling,
            grammar=grammar,
            stream=False,
        )
        outputs: list[RequestOutput] = []
        async for output in self._recorder.stream_request(request, program=self._program):
            outputs.append(output)
        self._ids += outputs[-1].token_ids
        return outputs[-1].text

    async def select(self, options: Sequence[str]) -> str:
        ids = [tuple(self._recorder.tokenizer.encode(option)) for option in options]
        found = await asyncio.gather(*(self._score(one) for one in ids))
        best = max(range(len(options)), key=lambda i: found[i])
        self._ids += ids[best]
        return options[best]

    async def _score(self, option: tuple[int, ...]) -> float:
        request: Any = ScoreRequest(
            request_id=self._recorder.engine.new_request_id(), prompt=tuple(self._ids), continuations=(option,)
        )
        output = await self._recorder.score_request(request, program=self._program)
        return sum(output.logprobs[0]) / len(option)
