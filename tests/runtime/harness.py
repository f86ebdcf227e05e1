"""An engine core over the scripted executor, and what its tests do with one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from sglite.protocol import (
    GenerateRequest,
    RequestOutput,
    SamplingParams,
    ScoreOutput,
    ScoreRequest,
    merge_outputs,
)
from sglite.runtime.config import EngineConfig, SamplingDefaults
from sglite.runtime.engine import EngineCore
from tests.fakes.executor import ScriptedExecutor, scripted_greedy
from tests.fakes.matcher import FakeGrammars, LoopFiller
from tests.fakes.tokenizer import ByteTokenizer

VOCAB = ByteTokenizer.vocab_size


class Harness:
    """`kwargs` are options of the engine; a few name the scripted executor's size, unless a real one is given."""

    def __init__(
        self,
        *,
        num_pages: int = 4096,
        page_size: int = 1,
        max_rows: int = 32,
        max_model_len: int = 512,
        clock: Callable[[], float] | None = None,
        tokenizer: ByteTokenizer | None = None,
        filler: LoopFiller | None = None,
        shares_prefix_reads: bool = False,
        executor: Any = None,
        **options: Any,
    ) -> None:
        self.executor: Any = executor
        if executor is None:
            self.executor = ScriptedExecutor(
                num_pages=num_pages, page_size=page_size, max_rows=max_rows, max_len=max_model_len
            )
            self.executor.shares_prefix_reads = shares_prefix_reads
        self.grammars = FakeGrammars(filler)
        config = EngineConfig(**({"overlap": False, "page_size": page_size, "gang_wait_s": 0.0} | options))
        more = {} if clock is None else {"clock": clock}
        self.core = EngineCore(
            self.executor,
            tokenizer or ByteTokenizer(),
            self.grammars,
            config,
            max_model_len=max_model_len,
            defaults=SamplingDefaults(temperature=0.0),
            **more,
        )
        self.outputs: list[RequestOutput | ScoreOutput] = []
        self._count = 0

    def add(self, prompt: str | Sequence[int], request_id: str | None = None, **fields: Any) -> str:
        """Queue a completion; sampling parameters and request fields are told apart by their names."""
        self._count += 1
        request_id = request_id or f"r{self._count}"
        params = {k: fields.pop(k) for k in list(fields) if k in SamplingParams.__struct_fields__}
        self.core.add(
            GenerateRequest(
                request_id=request_id,
                prompt=prompt if isinstance(prompt, str) else tuple(prompt),
                sampling_params=SamplingParams(**params),
                **fields,
            )
        )
        return request_id

    def score(self, prompt: str | Sequence[int], continuations: Iterable[Sequence[int]]) -> ScoreOutput:
        self._count += 1
        request_id = f"s{self._count}"
        self.core.add(
            ScoreRequest(
                request_id=request_id,
                prompt=prompt if isinstance(prompt, str) else tuple(prompt),
                continuations=tuple(tuple(c) for c in continuations),
            )
        )
        self.run()
        output = next(o for o in self.outputs if o.request_id == request_id)
        assert isinstance(output, ScoreOutput)
        return output

    def step(self) -> list[RequestOutput | ScoreOutput]:
        """One turn, with every promise about pages checked after it."""
        new = self.core.step()
        problems = list(self.core.problems())
        assert not problems, problems
        self.outputs += new
        return new

    def run(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if not self.core.has_work:
                return
            self.step()
        raise AssertionError("the engine does not come to an end")

    def pieces(self, request_id: str, index: int = 0) -> list[RequestOutput]:
        return [
            o for o in self.outputs if isinstance(o, RequestOutput) and o.request_id == request_id and o.index == index
        ]

    def output(self, request_id: str, index: int = 0) -> RequestOutput:
        """The whole completion from its pieces, of which only the last is final."""
        pieces = self.pieces(request_id, index)
        assert pieces and pieces[-1].finished, f"{request_id} has not ended"
        assert not any(p.finished for p in pieces[:-1])
        return merge_outputs(pieces)

    def generate(self, prompt: str | Sequence[int], **fields: Any) -> RequestOutput:
        request_id = self.add(prompt, **fields)
        self.run()
        return self.output(request_id)


def greedy(prompt: str | Sequence[int], n: int) -> list[int]:
    ids = prompt.encode() if isinstance(prompt, str) else prompt
    return scripted_greedy(list(ids), n, VOCAB)
