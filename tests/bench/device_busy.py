"""Question: how much of the time is the device busy, and with what, while an engine works through a workload?

    python -m tests.bench.device_busy --model DIR --workload free_1

Runs the workload twice unmeasured, then once under torch.profiler. Busy is the union of all kernels' and copies'
intervals (with programmatic dependent launch they overlap) over the time from the first's start to the last's end.
Prints the kernels by time and, as the last line, one JSON object. The profiler itself slows the host.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys

import torch

from sglite.bench.offline import run_once
from sglite.bench.workloads import workload
from sglite.runtime.async_engine import Engine


def main() -> None:
    ap = argparse.ArgumentParser()
    ap.add_argument("--model", required=True)
    ap.add_argument("--workload", default="free_1")
    args = ap.parse_args()
    load = workload(args.workload)
    with Engine(model=args.model, load_format="dummy", device="cuda") as engine:
        plain = min(run_once(engine, load, seed=i) for i in range(3))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            profiled = run_once(engine, load, seed=9)
    spans = []
    total: collections.Counter[str] = collections.Counter()
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spans.append((event.time_range.start, event.time_range.end))
            total[event.name.split("(")[0][:60]] += event.time_range.end - event.time_range.start
    spans.sort()
    busy, end = 0.0, spans[0][0]
    for first, last in spans:
        busy += max(0.0, last - max(first, end))
        end = max(end, last)
    whole = end - spans[0][0]
    for name, micros in total.most_common(14):
        print(f"{micros / 1e3:10.2f} ms  {name}", file=sys.stdout)
    print(
        json.dumps(
            {
                "workload": args.workload,
                "seconds": plain,
                "seconds_profiled": profiled,
                "busy_share": busy / whole,
                "device_ms": whole / 1e3,
            }
        )
    )


if __name__ == "__main__":
    main()
