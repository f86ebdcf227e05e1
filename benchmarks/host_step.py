"""What does the host side of a decode step cost, per step, without a model?

Runs the engine core over an executor that computes nothing and prints the microseconds of CPU time that its thread
spends per step, for 1, 32 and 256 rows, with streaming on and off. CPU time, so that a busy machine does not count;
"best" is the median of the fastest tenth. The last line is one JSON object.

    python benchmarks/host_step.py [--steps 400] [--prompt 512]
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from typing import Any

from sglite.protocol import GenerateRequest, SamplingParams
from sglite.runtime.config import EngineConfig
from sglite.runtime.engine import EngineCore
from tests.fakes.executor import NullExecutor
from tests.fakes.tokenizer import ByteTokenizer


def measure(rows: int, *, stream: bool, overlap: bool, steps: int, prompt: int) -> dict[str, Any]:
    executor = NullExecutor(num_pages=rows * (prompt + steps + 64), max_rows=rows, max_len=prompt + steps + 64)
    config = EngineConfig(overlap=overlap, max_step_tokens=1 << 20)
    core = EngineCore(executor, ByteTokenizer(), None, config, max_model_len=prompt + steps + 64)
    for i in range(rows):
        ids = (i % 256, i // 256, *([65] * (prompt - 2)))
        params = SamplingParams(max_tokens=steps + 40, ignore_eos=True)
        core.add(GenerateRequest(request_id=str(i), prompt=ids, sampling_params=params, stream=stream))
    for _ in range(20):
        core.step()
    times = []
    for _ in range(steps):
        began = time.thread_time()
        core.step()
        times.append(time.thread_time() - began)
    times.sort()
    return {
        "rows": rows,
        "stream": stream,
        "overlap": overlap,
        "mean_us": round(1e6 * sum(times) / steps, 1),
        "median_us": round(1e6 * times[steps // 2], 1),
        "best_us": round(1e6 * times[steps // 20], 1),
        "p99_us": round(1e6 * times[steps * 99 // 100], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--prompt", type=int, default=512)
    args = parser.parse_args()
    results = []
    print(f"{'rows':>5} {'stream':>7} {'overlap':>8} {'mean':>8} {'median':>8} {'best':>8} {'p99':>8}  microseconds")
    for rows in (1, 32, 256):
        for stream in (False, True):
            for overlap in (False, True):
                r = measure(rows, stream=stream, overlap=overlap, steps=args.steps, prompt=args.prompt)
                results.append(r)
                numbers = " ".join(f"{r[name]:8}" for name in ("mean_us", "median_us", "best_us", "p99_us"))
                print(f"{rows:5} {stream!s:>7} {overlap!s:>8} {numbers}")
    print(json.dumps({"python": platform.python_version(), "machine": platform.machine(), "results": results}))


if __name__ == "__main__":
    main()
