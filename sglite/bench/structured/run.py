"""Cases through one in-process Engine. Each run has schemas of its own (they differ in what they are described as), so
that nothing is remembered of a constraint from the run before, unless `warm` asks for it; kernels and graphs are warm.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from sglite.bench.structured.cases import Case, case
from sglite.grammar import spec
from sglite.protocol import GenerateRequest, GrammarSpec, RequestOutput, SamplingParams
from sglite.runtime.async_engine import Engine

_TIMES = ("schedule_s", "forward_s", "mask_s", "sample_s", "wait_s", "apply_s")


@dataclass
class Way:
    """How a case is run."""

    temperature: float = 0.0
    jump: bool = True
    warm: bool = False  # the memory of the constraint's positions is that of the runs before, of other prompts
    free: bool = False  # the same prompts without any constraint

    @property
    def label(self) -> str:
        parts = ["free" if self.free else "", "warm" if self.warm else "", "" if self.jump else "no jump"]
        parts.append(f"t={self.temperature:g}" if self.temperature else "")
        return ", ".join(part for part in parts if part) or "cold"


@dataclass
class Row:
    case: str
    way: str
    rate: float  # output tokens a second: the median
    runs: list[float]
    forced_share: float  # of the output tokens
    tokens_per_step: float  # of a row, over the steps of the call
    distinct: int  # outputs
    step_ms: dict[str, float] = field(default_factory=dict)


@dataclass
class Report:
    model: str
    rows: list[Row] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def run(
    engine: Engine, names: Sequence[str], ways: Sequence[Way], *, repeat: int, note: Callable[[str], None]
) -> Report:
    """`note` gets a line per result. Raises InvalidRequest for an unknown case before anything is measured."""
    cases = [case(name) for name in names]
    report = Report(engine.config.model)
    for one in cases:
        for way in ways:
            report.rows.append(measure(engine, one, way, repeat=repeat))
            note(line(report.rows[-1]))
    return report


def measure(engine: Engine, one: Case, way: Way, *, repeat: int) -> Row:
    """One unmeasured run, then `repeat` measured ones; numbers besides the rates are means over these."""
    rates: list[float] = []
    before: dict[str, Any] = {}
    outputs: list[RequestOutput] = []
    for i in range(repeat + 1):
        if i == 1:
            before = engine.stats()
        began = time.perf_counter()
        outputs = asyncio.run(_answers(engine, requests_of(engine, one, way, seed=i), one.rows))
        seconds = time.perf_counter() - began
        if i:
            rates.append(sum(o.usage.completion_tokens for o in outputs) / seconds)
    after = engine.stats()
    steps = (after["steps"] - before["steps"]) or 1
    tokens = sum(o.usage.completion_tokens for o in outputs)
    return Row(
        case=one.name,
        way=way.label,
        rate=statistics.median(rates),
        runs=rates,
        forced_share=sum(o.usage.forced_tokens for o in outputs) / tokens,
        tokens_per_step=tokens / one.rows * repeat / steps,
        distinct=len({o.text for o in outputs}),
        step_ms={name[:-2]: 1e3 * (after[name] - before[name]) / steps for name in _TIMES},
    )


def requests_of(engine: Engine, one: Case, way: Way, *, seed: int) -> list[GenerateRequest]:
    vocab = min(engine.model_info.vocab_size, 150_000)
    sampling = SamplingParams(max_tokens=one.output, temperature=way.temperature, ignore_eos=True, seed=seed)
    constraint = described(one, 0 if way.warm else seed, way)
    return [
        GenerateRequest(
            request_id=engine.new_request_id(),
            prompt=prompt,
            sampling_params=sampling,
            grammar=constraint if i % one.rows < one.bound and not way.free else None,
            jump_forward=way.jump,
            stream=False,
        )
        for i, prompt in enumerate(one.prompts(vocab, seed=str(seed)))
    ]


def described(one: Case, seed: int, way: Way) -> GrammarSpec:
    """The case's constraint: another description is another constraint to the engine."""
    return spec.json_schema({"description": f"{one.name} {way.label} {seed}", **one.schema})


async def _answers(engine: Engine, requests: list[GenerateRequest], rows: int) -> list[RequestOutput]:
    """So many at any time."""
    free = asyncio.Semaphore(rows)
    return list(await asyncio.gather(*(_answer(engine, request, free) for request in requests)))


async def _answer(engine: Engine, request: GenerateRequest, free: asyncio.Semaphore) -> RequestOutput:
    last: RequestOutput | None = None
    async with free:
        async for output in engine.stream_request(request):
            last = output
    assert last is not None
    return last


def line(row: Row) -> str:
    times = " ".join(f"{name} {ms:.2f}" for name, ms in row.step_ms.items())
    return (
        f"{row.case:12} {row.way:14} {row.rate:9.0f} tok/s  forced {100 * row.forced_share:4.1f} %  "
        f"{row.tokens_per_step:5.2f} tokens a step  {row.distinct:4} distinct  ms a step: {times}"
    )
