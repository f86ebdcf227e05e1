"""`sglite bench programs` on an H200 that computes nothing: whether the host keeps up, as a ratio within one run.

    python -m benchmarks.simulated.programs FOLDER [--workloads hellaswag,mmlu] [--at-once 16] [--process | --server]

Seconds are those of the H200's host (`--slower`: how many times slower the cores here are). Of each way the median run:
seconds, steps, steps of the critical path, time over it, seconds that the device worked, admissions, rows that went on;
with `--server` also the CPU seconds of the client and of the server. Client, server and engine are three processes then
and want three cores: with fewer they wait for each other as they would not on the H200's host.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.simulated import Simulation, engine
from sglite.bench.programs import price
from sglite.bench.programs.shapes import Shape, Texts
from sglite.bench.programs.stands import EngineStand, Measured, Stand, server
from sglite.bench.programs.workloads import Workload, workload
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
    parser.add_argument("--server", action="store_true", help="against a server")
    parser.add_argument("--ways", help="comma-separated; all by default")
    options = parser.parse_args()
    with stand(options) as one:
        pauses = options.pause_scale * options.slower
        texts = Texts(one.tokenizer, Shape(scale=options.scale, pause_scale=pauses, share=options.share))
        for name in options.workloads.split(","):
            measure(one, name, workload(name, texts), options)


@contextmanager
def stand(options: argparse.Namespace) -> Iterator[Stand]:
    simulation, config = Simulation(slower=options.slower, agree=options.agree), EngineConfig(model=options.folder)
    if options.server:
        given = json.dumps(dataclasses.asdict(simulation))
        command = (sys.executable, "-m", "benchmarks.simulated.served", given)
        with server(config, command=command, where="process") as served:
            yield served
    else:
        more = {"process": True} if options.process else {}
        with engine(config, simulation, **more) as one:
            yield EngineStand(one)


def measure(one: Stand, name: str, load: Workload, options: argparse.Namespace) -> None:
    """All ways in turns; the first of each warms up."""
    arguments = load.arguments(options.at_once)
    ways = one.ways if options.ways is None else tuple(options.ways.split(","))
    found: dict[str, list[Measured]] = {way: [] for way in ways}
    for number in range(1 + options.repeat):
        for way in ways:
            gc.collect()
            run = one.run_once(load, arguments, way, options.at_once)
            if number:
                found[way].append(run)
    seconds: dict[str, float] = {}
    for way, runs in found.items():
        run = sorted(runs, key=lambda run: run.seconds)[len(runs) // 2]
        seconds[way] = run.seconds
        path, counts = price.critical_path(run.calls, chunk=8192), run.counts
        over = run.seconds / (path.seconds + max(map(load.pause_s, arguments)))
        cpu = "".join(
            f"  {who} {counts[who] / options.slower:.3f}" for who in ("client_s", "server_s") if who in counts
        )
        print(
            f"{name:20} {way:9} {run.seconds / options.slower:7.3f} s  steps {counts['steps']:4.0f}"
            f"  path {path.steps:4} ({over:4.2f})  device {counts['device_s'] / options.slower:6.3f}"
            f"  admissions {counts['admissions']:.0f}  continued {counts['resumptions']:.0f}"
            f"  computed {counts['computed_tokens']:.0f}{cpu}",
            flush=True,
        )
    ratios = "  ".join(f"{way} {seconds[way] / seconds[ways[0]]:.2f}" for way in ways[1:])
    print(f"{name:20} ratio {ratios}", flush=True)


if __name__ == "__main__":
    main()
