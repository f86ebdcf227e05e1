"""What cold constraints cost the streams beside them on the host, measured on a CPU: `bench structured`'s bystander
test with an engine process whose device only takes time.

    python -m tests.bench.bystander_host TOKENIZER_FOLDER [--streams 32] [--arrivals 32] [--step-ms 1.3]

FOLDER holds a tokenizer of the size in question.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

from sglite.bench.structured import bystander
from sglite.runtime.async_engine.facade import Engine
from sglite.runtime.async_engine.front import Front
from sglite.runtime.async_engine.process import ProcessBack
from sglite.runtime.async_engine.thread import Built
from sglite.runtime.batch import Batch
from sglite.runtime.config import EngineConfig
from sglite.text.tokenizer import Tokenizer
from tests.bench import program_host
from tests.bench.program_host import TimedExecutor, busy_launches


class SmallSteps(TimedExecutor):
    """Every step is a captured one."""

    def forward(self, batch: Batch) -> None:
        busy_launches(program_host._OPS_GRAPH)
        self.device_s += self._step_s
        self._free_at = max(time.perf_counter(), self._free_at) + self._step_s + self._token_s * batch.num_tokens

    def caught_up(self) -> bool:
        return time.perf_counter() >= self._free_at


def build(config: EngineConfig, progress: Callable[[str], None]) -> Built:
    """In the engine's process."""
    program_host.TimedExecutor = SmallSteps  # type: ignore[misc]
    options = SimpleNamespace(
        tokenizer=os.environ["BYSTANDER_TOKENIZER"],
        max_rows=256,
        step_ms=float(os.environ["BYSTANDER_STEP_MS"]),
        token_us=3.0,
        agree=False,
    )
    return program_host.builder(options)()  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--arrivals", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--step-ms", type=float, default=1.3)
    given = parser.parse_args()
    os.environ["BYSTANDER_TOKENIZER"], os.environ["BYSTANDER_STEP_MS"] = given.tokenizer, str(given.step_ms)
    tokenizer = Tokenizer.from_folder(Path(given.tokenizer))
    front = Front()
    config = EngineConfig(model=given.tokenizer)
    builder = f"{__spec__.name}:build" if __spec__ is not None else "tests.bench.bystander_host:build"
    back = ProcessBack(config, front, builder=builder, load_tokenizer=lambda ready: tokenizer)
    started = back.start()
    with Engine.over(front, back, started.tokenizer, started.model_info) as engine:
        for way, gaps in bystander.run(
            engine, streams=given.streams, arrivals=given.arrivals, tokens=given.tokens
        ).items():
            print(f"{way:18} p50 {gaps.p50:6.2f}  p99 {gaps.p99:6.2f}  most {gaps.most:7.2f} ms", flush=True)


if __name__ == "__main__":
    main()
