"""What does the cold compile of a schema cost, in this tree and in another?

    chrt -f 10 taskset -c 1 python tests/bench/cold_compile.py DATA.jsonl.xz TREE [TREE ...] --tokenizer FOLDER

DATA as for grammar.py. One process a tree and round, without Python's collector (as in the worker that plans); each
schema is taken by all of them in turn, so that a machine that changes its speed changes it for all. Prints CPU
milliseconds of each round, and of the lowest that each schema took: front end (its text, its plan) and engine together.
"""

from __future__ import annotations

import argparse
import gc
import json
import lzma
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np


def serve(data: Path, tokenizer: Path) -> None:
    """Reads numbers of schemas, answers [front end, engine] in ms each, or null where one is refused."""
    from sglite.errors import SgliteError
    from sglite.grammar import spec
    from sglite.grammar.engines import route
    from sglite.grammar.engines.llguidance import LLGuidanceEngine
    from sglite.grammar.vocab import Vocab
    from sglite.text.tokenizer import Tokenizer

    vocab = Vocab.of(Tokenizer.from_folder(str(tokenizer)))
    vocab.warm()
    engine = LLGuidanceEngine(vocab, follow=False)

    def times(text: str) -> list[float] | None:
        began = time.thread_time()
        try:
            wanted = spec.json_schema(text)
            plan = route.plan(wanted)
            planned = time.thread_time()
            engine.compile(wanted, plan.grammar)
        except SgliteError:
            return None
        return [(planned - began) * 1e3, (time.thread_time() - planned) * 1e3]

    with lzma.open(data, "rt", encoding="utf-8") as file:
        schemas = [json.dumps(json.loads(line)["schema"]) for line in file]
    times('{"type":"object"}')
    gc.collect()
    gc.freeze()
    gc.disable()
    print(len(schemas), flush=True)
    for line in sys.stdin:
        print(json.dumps(times(schemas[int(line)])), flush=True)
        gc.collect()


def one_round(trees: list[str], data: Path, tokenizer: Path) -> list[list[list[float] | None]]:
    """By tree, by schema."""
    command = [sys.executable, __file__, str(data), "--tokenizer", str(tokenizer), "--serve"]
    pipe = subprocess.PIPE
    served: list[Any] = [
        subprocess.Popen([*command, tree], stdin=pipe, stdout=pipe, text=True, env={"PYTHONPATH": tree})
        for tree in trees
    ]
    count = min(int(process.stdout.readline()) for process in served)
    found: list[list[list[float] | None]] = [[] for _ in trees]
    for number in range(count):
        for process, mine in zip(served, found, strict=True):
            process.stdin.write(f"{number}\n")
            process.stdin.flush()
            mine.append(json.loads(process.stdout.readline()))
    for process in served:
        process.stdin.close()
        process.wait()
    return found


def told(name: str, times: list[float]) -> str:
    p50, p90, p99 = np.percentile(times, (50, 90, 99))
    over = sum(one > 50 for one in times)
    spread = f"p50 {p50:.1f} p90 {p90:.1f} p99 {p99:.1f} longest {max(times):.0f}"
    return f"{name}: {len(times)} accepted, {spread}, {over} over 50 ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("trees", nargs="+", metavar="TREE")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.data, args.tokenizer)
        return
    lowest: list[dict[int, float]] = [{} for _ in args.trees]
    for number in range(args.rounds):
        for tree, least, found in zip(
            args.trees, lowest, one_round(args.trees, args.data, args.tokenizer), strict=True
        ):
            taken = {i: sum(times) for i, times in enumerate(found) if times is not None}
            for i, time_taken in taken.items():
                least[i] = min(least.get(i, time_taken), time_taken)
            print(told(f"round {number + 1}, {tree}", list(taken.values())), flush=True)
    for tree, least in zip(args.trees, lowest, strict=True):
        print(told(f"lowest, {tree}", list(least.values())))


if __name__ == "__main__":
    main()
