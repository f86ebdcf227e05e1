"""Does a hostile schema or regex every second slow the other requests' steps?

16 requests stream without end on a tiny random model; the time of each step is taken around the engine's own step.
First alone, then with a constraint a second that is large, deep, exponential or malformed; in turns, so that both see
the same machine. Prints a line a run and, as its last line, one JSON object.

    python benchmarks/hostile_schema.py [--steps 2000] [--runs 3] [--out benchmarks/hostile_schema.json]

On a machine that others use too, Linux can weigh this session above theirs (as root), which leaves engine and compile
workers as they stand to each other:

    setsid --wait bash -c 'echo -20 > /proc/self/autogroup; exec python benchmarks/hostile_schema.py'
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from sglite.errors import SgliteError
from sglite.protocol import GenerateRequest, SamplingParams
from sglite.runtime.async_engine import Engine
from sglite.runtime.async_engine.build import build
from sglite.runtime.async_engine.front import Front
from sglite.runtime.async_engine.thread import Built, ThreadBack
from sglite.runtime.config import EngineConfig

ROWS = 16
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 49152,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "hidden_act": "silu", "eos_token_id": 2, "bos_token_id": 1,
}  # fmt: skip


def hostile(number: int) -> dict[str, Any]:
    """Never the same twice, or it would come from the cache."""
    nested: Any = {"type": "object", "properties": {f"k{number}": {"type": "string"}}}
    for i in range(6):
        nested = {
            "oneOf": [{"type": "object", "properties": {f"p{i}": nested}}, nested, {"type": "array", "items": nested}]
        }
    deep: Any = {"type": "integer", "minimum": number}
    for _ in range(300):
        deep = {"type": "object", "properties": {"x": deep}, "required": ["x"]}
    wide = {"type": "object", "properties": {f"n{number}_{i}": {"type": "string", "maxLength": i} for i in range(3000)}}
    lengths = {"type": "array", "minItems": 5, "maxItems": 15, "items": {"type": "string", "maxLength": 200 + number}}
    choices: list[dict[str, Any]] = [
        {"json_schema": nested},
        {"json_schema": deep},
        {"json_schema": wide},
        {"json_schema": {"type": "object", "properties": dict.fromkeys("abcdef", lengths)}},
        {"regex": f"(a{{1,{200 + number}}}b?){{1,200}}c"},
        {"regex": "[a" + str(number)},
    ]
    return choices[number % len(choices)]


class Timed:
    """A core whose steps are timed."""

    def __init__(self, built: Built) -> None:
        self.seconds: list[float] = []
        step = built.core.step

        def timed() -> Any:
            begun = time.perf_counter()
            outputs = step()
            self.seconds.append(time.perf_counter() - begun)
            return outputs

        built.core.step = timed  # type: ignore[method-assign]


async def phase(engine: Engine, timed: Timed, steps: int, *, attacked: bool, offset: int) -> float:
    """The 99th percentile of the time of `steps` steps, in milliseconds."""
    streams = [asyncio.ensure_future(_endless(engine, f"{offset}-{i}")) for i in range(ROWS)]
    await asyncio.sleep(1.0)
    timed.seconds.clear()
    number, due, attacks = offset, time.monotonic(), []
    while len(timed.seconds) < steps:
        await asyncio.sleep(0.01)
        if attacked and time.monotonic() > due:
            due += 1.0
            number += 1
            attacks.append(asyncio.ensure_future(_attack(engine, number)))
    seconds = sorted(timed.seconds[:steps])
    for task in (*streams, *attacks):
        task.cancel()
    await asyncio.gather(*streams, *attacks, return_exceptions=True)
    return 1000 * seconds[int(0.99 * len(seconds))]


async def _endless(engine: Engine, name: str) -> None:
    params = SamplingParams(ignore_eos=True, temperature=0.0)
    while True:
        request = GenerateRequest(request_id=f"{name}-{time.monotonic_ns()}", prompt=(5, 6, 7), sampling_params=params)
        async for _ in engine.stream_request(request):
            pass


async def _attack(engine: Engine, number: int) -> None:
    try:
        await engine.generate_async("x", {"max_new_tokens": 4, "temperature": 0}, **hostile(number))
    except SgliteError:
        return


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        config = EngineConfig(model=folder, tokenizer="smollm2", load_format="dummy", num_pages=200_000)
        front = Front()
        made: list[Timed] = []

        def make() -> Built:
            built = build(config, lambda text: None)
            made.append(Timed(built))
            return built

        back = ThreadBack(make, front)
        built = back.start()
        with Engine.over(front, back, built.tokenizer, built.model_info) as engine:
            rows = []
            for run in range(options.runs):
                alone = asyncio.run(phase(engine, made[0], options.steps, attacked=False, offset=1000 * run))
                attacked = asyncio.run(phase(engine, made[0], options.steps, attacked=True, offset=1000 * run + 500))
                rows.append((alone, attacked, attacked / alone - 1))
                print(
                    f"run {run}: p99 alone {alone:.2f} ms, attacked {attacked:.2f} ms, {rows[-1][2]:+.0%}", flush=True
                )
    result = {
        "p99_alone_ms": statistics.median(row[0] for row in rows),
        "p99_attacked_ms": statistics.median(row[1] for row in rows),
        "change": statistics.median(row[2] for row in rows),
        "changes": [row[2] for row in rows],
        "steps": options.steps,
        "runs": options.runs,
        "load_average": list(os.getloadavg()),
    }
    print(json.dumps(result))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
