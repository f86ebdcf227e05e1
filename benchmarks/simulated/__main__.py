"""Workloads of `sglite bench offline` on the simulated device; see the package's docstring.

    python -m benchmarks.simulated FOLDER [--workloads json_1,free_1,json_32,free_32] [--repeat 3] [--slower 1.5]

Prints tokens a second as they would be on the H200 (seconds are divided by `--slower`), and for each step: host and
device milliseconds of this machine. `idle` is the share of the time in which the device stood still. Last comes what
this machine takes to schedule a step of free rows and to take its result in, over what the H200's host took at commit
c76b99f: about what `--slower` should be, and more the more the host's work has shrunk since.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from benchmarks.simulated.engine import Simulation, engine
from benchmarks.simulated.times import HOST_STEP_S
from sglite.bench.offline import run_once
from sglite.bench.workloads import Workload, workload
from sglite.runtime.async_engine import Engine
from sglite.runtime.config import EngineConfig

PHASES = ("schedule_s", "forward_s", "mask_s", "sample_s", "wait_s", "apply_s", "device_s")
_HOST = {f"free_{rows}": times for rows, times in HOST_STEP_S.items()}


def measure(one: Engine, load: Workload, *, repeat: int, slower: float, seed: int = 0) -> dict[str, Any]:
    """One run that is not counted, then `repeat`."""
    runs: list[float] = []
    before: dict[str, Any] = {}
    for i in range(repeat + 1):
        if i == 1:
            before = one.stats()
        began = time.perf_counter()
        run_once(one, load, seed=seed + i)
        if i:
            runs.append(time.perf_counter() - began)
    after = one.stats()
    steps = max(1, after["steps"] - before["steps"])
    gained = {
        name: after[name] - before[name] for name in (*PHASES, "idle_s", "late_s", "forced_tokens", "late_tokens")
    }
    return {
        "name": load.name,
        "rate": load.rows * load.output / statistics.median(runs) * slower,
        "runs": runs,
        "steps": steps / repeat,
        "ms": {name[:-2]: 1e3 * gained[name] / steps for name in PHASES},
        "idle": gained["idle_s"] / sum(runs),
        "simulation_late": gained["late_s"] / sum(runs),
        "forced": gained["forced_tokens"] / repeat,
        "late": gained["late_tokens"] / repeat,
    }


def line(found: dict[str, Any]) -> str:
    times = " ".join(f"{name} {ms:.3f}" for name, ms in found["ms"].items())
    return (
        f"{found['name']:9} {found['rate']:8.0f} tok/s  {found['steps']:5.0f} steps  idle {found['idle']:6.1%}"
        f"  sim late {found['simulation_late']:.1%}  forced {found['forced']:5.0f}  late {found['late']:4.0f}"
        f"  ms a step: {times}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--workloads", default="json_1,free_1,json_32,free_32,json_256,free_256")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--slower", type=float, default=1.5)
    parser.add_argument("--repeat-token", type=float, default=0.98)
    given = parser.parse_args()
    rates: dict[str, float] = {}
    host: dict[str, float] = {}
    with engine(EngineConfig(model=given.model), Simulation(slower=given.slower, repeat=given.repeat_token)) as one:
        for name in given.workloads.split(","):
            found = measure(one, workload(name), repeat=given.repeat, slower=given.slower)
            rates[name] = found["rate"]
            if name in _HOST:
                host[name] = 1e-3 * (found["ms"]["schedule"] + found["ms"]["apply"]) / sum(_HOST[name])
            print(line(found), flush=True)
    for name, rate in rates.items():
        kind, _, rows = name.partition("_")
        if kind == "json" and f"free_{rows}" in rates:
            print(f"json_{rows} / free_{rows} = {rate / rates[f'free_{rows}']:.3f}")
    for name, times in host.items():
        print(f"the host's step of {name}: {times:.2f} times the H200's")


if __name__ == "__main__":
    main()
