"""Free streams beside constraints that arrive cold: the time between tokens of the streams. Beside, for comparison, the
same requests without constraints: any prompt that comes in lengthens a step.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sglite.bench.structured.cases import SCHEMAS, Case
from sglite.errors import SgliteError
from sglite.grammar import spec
from sglite.protocol import GenerateRequest, GrammarSpec, SamplingParams
from sglite.runtime.async_engine import Engine


@dataclass(frozen=True)
class Gaps:
    """Milliseconds between two tokens of a stream."""

    p50: float
    p99: float
    most: float

    @staticmethod
    def of(seconds: list[float]) -> Gaps:
        p50, p99 = np.percentile(seconds, (50, 99))
        return Gaps(1e3 * float(p50), 1e3 * float(p99), 1e3 * max(seconds))


def hostile(number: int) -> dict[str, Any]:
    """Schemas that are dear in different ways, each new to the engine."""
    kinds: list[dict[str, Any]] = [
        {"enum": [f"value {number} {i}" for i in range(3000)]},
        {"type": "object", "properties": {f"key{number}_{i}": {"type": "string"} for i in range(500)}},
        {"type": "array", "items": {"type": "string", "maxLength": 20_000, "pattern": f"^(a|b{number % 7}|c)*d$"}},
        {
            "anyOf": [
                {"type": "object", "properties": {f"k{i}": SCHEMAS["deep"]}, "required": [f"k{i}"]} for i in range(20)
            ]
        },
    ]
    return {"description": str(number), **kinds[number % len(kinds)]}


def run(engine: Engine, *, streams: int, arrivals: int, tokens: int) -> dict[str, Gaps]:
    """Alone, beside `arrivals` free requests that come one after the other, and beside as many cold constraints."""
    constraints = [spec.json_schema(hostile(number)) for number in range(arrivals)]  # which is a client's work

    def gaps(others: Sequence[GrammarSpec | None]) -> Gaps:
        return Gaps.of(asyncio.run(_run(engine, streams, others, tokens)))

    for _ in range(2):  # kernels and graphs of all sizes of step
        gaps([None] * arrivals)
    return {"alone": gaps(()), "beside free ones": gaps([None] * arrivals), "beside cold ones": gaps(constraints)}


async def _run(engine: Engine, streams: int, others: Sequence[GrammarSpec | None], tokens: int) -> list[float]:
    load = Case("bystander", streams, 0, {})
    prompts = load.prompts(min(engine.model_info.vocab_size, 150_000), seed="bystander")
    arrivals = asyncio.create_task(_arrive(engine, others, prompts[0]))
    gaps = await asyncio.gather(*(_stream(engine, prompt, tokens) for prompt in prompts))
    await arrivals
    return [gap for one in gaps for gap in one]


async def _stream(engine: Engine, prompt: tuple[int, ...], tokens: int) -> list[float]:
    """The gaps after the first few tokens, which prompts still disturb."""
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    request = GenerateRequest(request_id=engine.new_request_id(), prompt=prompt, sampling_params=sampling)
    at: list[float] = []
    async for _ in engine.stream_request(request):
        at.append(time.perf_counter())
    return np.diff(at[8:]).tolist()


async def _arrive(engine: Engine, constraints: Sequence[GrammarSpec | None], prompt: tuple[int, ...]) -> None:
    for constraint in constraints:
        await asyncio.sleep(0.02)
        sampling = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
        try:
            request = GenerateRequest(
                request_id=engine.new_request_id(),
                prompt=prompt[:16],
                sampling_params=sampling,
                grammar=constraint,
            )
            async for _ in engine.stream_request(request):
                pass
        except SgliteError:
            continue  # refused, which is as good an answer
