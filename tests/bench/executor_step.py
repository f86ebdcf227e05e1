"""Question: what does a decode step cost on the device and on the host, without scheduler and engine?

    python -m tests.bench.executor_step --model DIR [--cases 1x256,32x320,256x320] [--steps 200] [--profile FILE]

N rows of L cached tokens (dummy weights, KV of no meaning) decode; step n is queued before the result of step n - 1
is waited for, as the engine does. Prints a table and, as the last line, one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np
import torch

from sglite.runtime.batch import DEVICE_TOKEN
from sglite.runtime.config import EngineConfig
from sglite.runtime.executor.build import build_executor
from sglite.runtime.executor.model_runner import ModelRunner
from sglite.runtime.models.loader import resolve_model
from tests.fakes.batches import Part, load_row, make_batch


def decode_steps(executor: ModelRunner, rows: int, length: int, steps: int) -> dict[str, float]:
    pages = np.arange(rows * (length + steps + 1), dtype=np.int32).reshape(rows, -1)
    first = make_batch(
        [Part(r, length - 1, [7]) for r in range(rows)],
        loads=[load_row(r) for r in range(rows)],
        updates=[(r, c, int(pages[r, c])) for r in range(rows) for c in range(length)],
    )
    executor.forward(first)
    pending = executor.sample(first)
    batches = [
        make_batch(
            [Part(r, length + i, [DEVICE_TOKEN], output_index=i + 1) for r in range(rows)],
            step=i,
            updates=[(r, length + i, int(pages[r, length + i])) for r in range(rows)],
        )
        for i in range(steps)
    ]
    forward = sample = waited = 0.0
    measured = steps // 2
    began = 0.0
    for i, batch in enumerate(batches):
        if i == steps - measured:
            pending.wait()
            began, forward, sample, waited = time.perf_counter(), 0.0, 0.0, 0.0
        a = time.perf_counter()
        executor.forward(batch)
        b = time.perf_counter()
        pending.wait()
        c = time.perf_counter()
        pending = executor.sample(batch)
        d = time.perf_counter()
        forward, waited, sample = forward + b - a, waited + c - b, sample + d - c
    pending.wait()
    whole = time.perf_counter() - began
    each = {"step": whole, "host_forward": forward, "host_sample": sample, "host_wait": waited}
    return {name: 1e3 * value / measured for name, value in each.items()}


def main() -> None:
    ap = argparse.ArgumentParser()
    ap.add_argument("--model", required=True)
    ap.add_argument("--cases", default="1x256,8x320,32x320,64x320,256x320")
    ap.add_argument("--steps", type=int, default=100)
    ap.add_argument("--profile")
    args = ap.parse_args()
    config = EngineConfig(model=args.model, load_format="dummy", max_model_len=16384, num_pages=700_000)
    began = time.perf_counter()
    executor = build_executor(config, resolve_model(args.model, load_format="dummy"), vocab_size=151_851)
    print(f"built in {time.perf_counter() - began:.1f} s", flush=True)
    found: dict[str, Any] = {}
    for case in args.cases.split(","):
        rows, length = map(int, case.split("x"))
        times = decode_steps(executor, rows, length, args.steps)
        found[case] = times
        print(
            f"{case:>9}: {times['step']:.3f} ms = {1e3 * rows / times['step']:.0f} tok/s; host: forward "
            f"{times['host_forward']:.3f}, sample {times['host_sample']:.3f}, waits {times['host_wait']:.3f} ms",
            flush=True,
        )
        if args.profile:
            activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
            with torch.profiler.profile(activities=activities) as profile:
                decode_steps(executor, rows, length, 20)
            table = profile.key_averages().table(
                sort_by="self_device_time_total", row_limit=22, max_name_column_width=60
            )
            with open(args.profile, "a") as file:
                file.write(f"{case}\n{table}\n")
    print(
        json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "model": args.model, **found})
    )


if __name__ == "__main__":
    main()
