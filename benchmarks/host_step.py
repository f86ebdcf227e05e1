"""What does the host side of a decode step cost, per step, without a model?

Runs the engine core over a device that computes nothing (benchmarks/simulated) and prints the microseconds of CPU time
that its thread spends per step, for 1, 32 and 256 rows: free ones with streaming on and off, and ones under the schema
of `bench offline`, whose positions are known from other prompts. CPU time, so that a busy machine does not count;
"best" is the median of the fastest tenth. The last line is one JSON object.

    python -m benchmarks.host_step [--steps 400] [--prompt 512] [--tokenizer FOLDER] [--only json]

Without a FOLDER tokens are bytes. What launches cost is not in these times, and waiting is not.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from typing import Any

from benchmarks.simulated.executor import SimulatedExecutor
from benchmarks.simulated.times import QWEN_06B
from sglite.bench.workloads import SCHEMA
from sglite.grammar import spec
from sglite.grammar.compiler import CompilerConfig, GrammarCompiler
from sglite.grammar.vocab import Vocab
from sglite.protocol import GenerateRequest, GrammarSpec, SamplingParams
from sglite.runtime.config import EngineConfig
from sglite.runtime.engine import EngineCore
from sglite.text.tokenizer import Tokenizer
from tests.fakes.tokenizer import ByteTokenizer

PHASES = ("schedule_s", "forward_s", "mask_s", "sample_s", "apply_s")


class Host:
    """One engine core, and what makes requests for it."""

    def __init__(self, tokenizer: Any, grammars: Any, *, rows: int, steps: int, prompt: int, overlap: bool) -> None:
        self.rows, self.steps, self.prompt = rows, steps, prompt
        self._vocab_size = tokenizer.vocab_size
        length = prompt + 2 * steps + 64
        executor = SimulatedExecutor(
            QWEN_06B,
            vocab_size=tokenizer.vocab_size,
            max_rows=rows,
            max_model_len=length,
            num_pages=2 * rows * length,
            max_step_tokens=1 << 18,
            repeat=0.98,
            idles=True,
        )
        config = EngineConfig(overlap=overlap, max_step_tokens=1 << 18, prefix_cache=False)
        self.core = EngineCore(executor, tokenizer, grammars, config, max_model_len=length)
        self._passes = 0

    def run(self, grammar: GrammarSpec | None, *, stream: bool, each: Callable[[Callable[[], Any]], None]) -> None:
        """Rows with prompts of their own, for that many steps behind their first ones; `each` is given each step."""
        self._passes += 1
        names = [f"{self._passes}/{i}" for i in range(self.rows)]
        sampling = SamplingParams(max_tokens=2 * self.steps + 40, ignore_eos=True)
        for i, name in enumerate(names):
            first = (self._passes, i % 256, i // 256)
            self.core.add(
                GenerateRequest(
                    request_id=name,
                    prompt=(*first, *([65] * (self.prompt - 3))),
                    sampling_params=sampling,
                    grammar=grammar,
                    stream=stream,
                )
            )
        while self.core.metrics.running < self.rows:
            if not self.core.has_work:
                time.sleep(0.001)  # the constraint is being compiled
            self.core.step()
        for _ in range(20):
            self.core.step()
        for _ in range(self.steps):
            each(self.core.step)
        for name in names:
            self.core.abort(name)
        while self.core.has_work:
            self.core.step()


def measure(host: Host, *, stream: bool, grammar: GrammarSpec | None) -> dict[str, Any]:
    if grammar is not None:
        for _ in range(2):
            host.run(grammar, stream=stream, each=lambda step: step())
    times: list[float] = []
    before: list[float] = []

    def timed(step: Callable[[], Any]) -> None:
        if not times:
            before.extend(getattr(host.core.metrics, name) for name in PHASES)
        began = time.thread_time()
        step()
        times.append(time.thread_time() - began)

    host.run(grammar, stream=stream, each=timed)
    after = [getattr(host.core.metrics, name) for name in PHASES]
    phases = {name[:-2]: round(1e6 * (b - a) / host.steps) for name, a, b in zip(PHASES, before, after, strict=True)}
    times.sort()
    steps = host.steps
    return {
        "mean_us": round(1e6 * sum(times) / steps, 1),
        "median_us": round(1e6 * times[steps // 2], 1),
        "best_us": round(1e6 * times[steps // 20], 1),
        "p99_us": round(1e6 * times[steps * 99 // 100], 1),
        "wall_us": phases,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokenizer")
    parser.add_argument("--only", choices=("free", "json"))
    parser.add_argument("--rows", default="1,32,256")
    args = parser.parse_args()
    tokenizer: Any = ByteTokenizer() if args.tokenizer is None else Tokenizer.from_folder(args.tokenizer)
    grammars = GrammarCompiler(Vocab.of(tokenizer), CompilerConfig(isolate=False))
    schema = spec.json_schema(SCHEMA)
    ways = [("free", False, False), ("free", False, True), ("free", True, False), ("free", True, True)]
    ways += [("json", False, True), ("json", True, True)]
    results: list[dict[str, Any]] = []
    names = ("mean", "median", "best", "p99")
    print(f"{'rows':>5} {'':4} {'stream':>7} {'overlap':>8} {' '.join(f'{name:>8}' for name in names)}  microseconds")
    for rows in map(int, args.rows.split(",")):
        for kind, stream, overlap in ways:
            if args.only in (None, kind):
                host = Host(tokenizer, grammars, rows=rows, steps=args.steps, prompt=args.prompt, overlap=overlap)
                r = measure(host, stream=stream, grammar=schema if kind == "json" else None)
                host.core.close()
                results.append({"rows": rows, "kind": kind, "stream": stream, "overlap": overlap} | r)
                numbers = " ".join(f"{r[name]:8}" for name in ("mean_us", "median_us", "best_us", "p99_us"))
                print(f"{rows:5} {kind} {stream!s:>7} {overlap!s:>8} {numbers}  wall: {r['wall_us']}", flush=True)
    grammars.close()
    print(json.dumps({"python": platform.python_version(), "machine": platform.machine(), "results": results}))


if __name__ == "__main__":
    main()
