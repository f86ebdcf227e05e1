"""`sglite bench programs` on an H200 that computes nothing: whether the host keeps up, as a ratio within one run.

    python -m benchmarks.simulated.programs FOLDER [--workloads hellaswag,mmlu] [--at-once 16] [--process]

Seconds are those of the H200's host (`--slower`: how many times slower the cores here are). Of each way the median run:
seconds, steps, steps of the critical path, time over it, seconds that the device worked, admissions, rows that went on.
"""

from __future__ import annotations

import argparse
import gc
from typing import Any

from benchmarks.simulated import Simulation, engine
from sglite.bench.programs import price
from sglite.bench.programs.run import WAYS, run_once
from sglite.bench.programs.shapes import Shape, Texts
from sglite.bench.programs.workloads import Workload, workload
from sglite.runtime.async_engine import Engine
from sglite.runtime.config import EngineConfig

_WORKLOADS = (
    "hellaswag,skeleton_of_thought,llm_judge,mmlu,rag_json,react,multi_turn_chat,multi_document_qa,tree_of_thought"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--workloads", default=_WORKLOADS)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--scale", type=float, default=0.4)
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--pause-scale", type=float, default=0.25)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--slower", type=float, default=1.5)
    parser.add_argument("--agree", type=float, default=0.97)
    parser.add_argument("--process", action="store_true", help="the engine has a process of its own")
    options = parser.parse_args()
    simulation = Simulation(slower=options.slower, agree=options.agree)
    more = {"process": True} if options.process else {}
    with engine(EngineConfig(model=options.folder), simulation, **more) as one:
        pauses = options.pause_scale * options.slower
        texts = Texts(one.tokenizer, Shape(scale=options.scale, pause_scale=pauses, share=options.share))
        for name in options.workloads.split(","):
            measure(one, name, workload(name, texts), options)


def measure(one: Engine, name: str, load: Workload, options: argparse.Namespace) -> None:
    """Both ways in turns; the first of each warms up."""
    arguments = load.arguments(options.at_once)
    found: dict[str, list[tuple[float, Any, float]]] = {way: [] for way in WAYS}
    for number in range(1 + options.repeat):
        for way in WAYS:
            gc.collect()
            before = one.stats()["device_s"]
            run = run_once(one, load, arguments, way, options.at_once)
            if number:
                found[way].append((run.seconds, run, one.stats()["device_s"] - before))
    seconds: dict[str, float] = {}
    for way, runs in found.items():
        took, run, device = sorted(runs, key=lambda entry: entry[0])[len(runs) // 2]
        seconds[way] = took
        path, counts = price.critical_path(run.calls, chunk=8192), run.counts
        over = took / (path.seconds + max(map(load.pause_s, arguments)))
        print(
            f"{name:20} {way:9} {took / options.slower:7.3f} s  steps {counts['steps']:4.0f}  path {path.steps:4}"
            f" ({over:4.2f})  device {device / options.slower:6.3f}  admissions {counts['admissions']:.0f}"
            f"  continued {counts['resumptions']:.0f}",
            flush=True,
        )
    print(f"{name:20} ratio {seconds['calls'] / seconds['programs']:.2f}", flush=True)


if __name__ == "__main__":
    main()
