"""Question: how much of the time is the device busy, and with what, while an engine works through a workload?

    python -m tests.bench.device_busy --model DIR --workload free_1 [--load-format dummy]

Three runs of the same workload, after two unmeasured ones:

    plain       wall time alone
    events      a CUDA event before and after each graph replay: the share of the time, from the first replay's start to
                the last one's end, in which the device is inside one. Costs the host 4 records a step, and no more
    profiled    torch.profiler, device activities only: the union of all kernels' and copies' intervals (with
                programmatic dependent launch they overlap) within one replay, over the time of that replay

Busy = events share * share of a replay in which some kernel runs. The profiler slows every graph launch (1.1 ms a step
instead of 0.68 on an H200), which is why the share of the profiled run itself says nothing about the plain one.
Prints the kernels by time, the idle times by what ran before and after them, and, as the last line, one JSON object.
"""

from __future__ import annotations

import argparse
import collections
import json
import statistics
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from sglite.bench.offline import run_once
from sglite.bench.workloads import Workload, workload
from sglite.runtime.async_engine import Engine

Span = tuple[float, float]


def main() -> None:
    ap = argparse.ArgumentParser()
    ap.add_argument("--model", required=True)
    ap.add_argument("--workload", default="free_1")
    ap.add_argument("--load-format", default="dummy")
    args = ap.parse_args()
    load = workload(args.workload)
    with Engine(model=args.model, load_format=args.load_format, device="cuda") as engine:
        run_once(engine, load, seed=0)
        before = engine.stats()
        plain = statistics.median(run_once(engine, load, seed=i) for i in range(1, 4))
        after = engine.stats()
        with_events, inside, replays = _with_events(engine, load)
        profiled, events = _profiled(engine, load)
    steps = load.output
    kernels = [(event.first, event.last) for event in events]
    share = _share_within(kernels)
    _print_times(events)
    done = after["steps"] - before["steps"]
    for phase in ("schedule_s", "forward_s", "sample_s", "wait_s", "apply_s"):
        print(f"host {phase[:-2]:9} {1e3 * (after[phase] - before[phase]) / done:.3f} ms a step")
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "model": args.model,
        "workload": args.workload,
        "ms_a_step": 1e3 * plain / steps,
        "ms_a_step_with_events": 1e3 * with_events / steps,
        "ms_a_step_profiled": 1e3 * profiled / steps,
        "replays": replays,
        "inside_replays": inside,
        "kernels_within_replays": share,
        "busy": inside * share,
        "kernel_ms_a_step_over_plain_ms_a_step": sum(b - a for a, b in _union(kernels)) / 1e6 / plain,
    }
    print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in found.items()}))


def _with_events(engine: Engine, load: Workload) -> tuple[float, float, int]:
    """(seconds, share of the device's time inside replays, replays)"""
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    replay = torch.cuda.CUDAGraph.replay

    def timed_replay(graph: torch.cuda.CUDAGraph) -> None:
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        replay(graph)
        after.record()
        events.append((before, after))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda.CUDAGraph, "replay", timed_replay)
        seconds = run_once(engine, load, seed=8)
    torch.cuda.synchronize()
    first = events[0][0]
    spans = [(first.elapsed_time(a), first.elapsed_time(b)) for a, b in events]
    inside = sum(b - a for a, b in _union(spans))
    return seconds, inside / max(b for _, b in spans), len(events)


@dataclass(frozen=True, slots=True)
class Event:
    """A kernel or a copy, times in microseconds."""

    first: float
    last: float
    name: str


def _profiled(engine: Engine, load: Workload) -> tuple[float, list[Event]]:
    """(seconds, everything that ran on the device, by its start)"""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        seconds = run_once(engine, load, seed=9)
    events = [
        Event(event.time_range.start, event.time_range.end, event.name.split("(")[0][:40])
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    return seconds, sorted(events, key=lambda event: event.first)


def _print_times(events: list[Event]) -> None:
    total: dict[str, float] = collections.defaultdict(float)
    idle: dict[str, float] = collections.defaultdict(float)
    times: collections.Counter[str] = collections.Counter()
    latest = events[0]
    for event in events:
        total[event.name] += event.last - event.first
        if event.first > latest.last:
            places = f"{latest.name} -> {event.name}"
            idle[places] += event.first - latest.last
            times[places] += 1
        if event.last > latest.last:
            latest = event
    for name, micros in _largest(total):
        print(f"{micros / 1e3:10.2f} ms  {name}")
    for places, micros in _largest(idle):
        print(f"{micros / 1e3:10.2f} ms idle in {times[places]:5} times  {places}")


def _largest(times: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(times.items(), key=lambda item: -item[1])[:8]


def _union(spans: list[Span]) -> list[Span]:
    """The same time without overlaps."""
    merged: list[Span] = []
    for a, b in sorted(spans):
        if merged and a <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(b, merged[-1][1])
        else:
            merged.append((a, b))
    return merged


_BETWEEN = 20.0  # microseconds without a kernel: the device waited for the host's next launch, between replays


def _share_within(kernels: list[Span]) -> float:
    """Share of the time in which a kernel runs, times between launches left out."""
    merged = _union(kernels)
    busy = sum(b - a for a, b in merged)
    gaps = sum(max(0.0, b[0] - a[1]) for a, b in zip(merged, merged[1:], strict=False) if b[0] - a[1] < _BETWEEN)
    return busy / (busy + gaps)


if __name__ == "__main__":
    main()
