"""What a step of constrained rows costs the host: tokens shown to the matchers, ends and forced text looked for, masks
made or found. No model: rows draw at random among what their masks allow.

    python -m tests.bench.constrained_step TOKENIZER_FOLDER [--rows 256] [--steps 200] [--schema json] [--asks]

Prints microseconds per row and step, of a first pass over new prompts and of a second with the memory warm from it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from sglite.bench.workloads import SCHEMA
from sglite.grammar import bitmask, spec
from sglite.grammar.compiler import CompilerConfig, GrammarCompiler
from sglite.grammar.matcher import REFUSED
from sglite.grammar.vocab import Vocab
from sglite.text.tokenizer import Tokenizer


def drawn(rng: np.random.Generator, ids: np.ndarray, words: np.ndarray, odd: float) -> int:
    return int(ids[rng.integers(len(ids))])


def walk(
    compiler: GrammarCompiler, schema: Any, *, rows: int, steps: int, seed: int, jump: bool, asks: bool
) -> Counter[str]:
    grammar = compiler.compile_now(spec.json_schema(schema))
    matchers = [grammar.matcher() for _ in range(rows)]
    rng = np.random.default_rng(seed)
    cost: Counter[str] = Counter()
    ids_of: dict[int, tuple[Any, np.ndarray]] = {}
    buffer = bitmask.empty(compiler.vocab.size, rows)
    for _ in range(steps):
        if asks:
            began = time.perf_counter()
            asked = compiler.filler.begin(matchers)
            cost["asked"] += len({id(ask) for ask in asked.values()})
            cost["late rows"] += len(asked)
            cost["masks"] += time.perf_counter() - began
            compiler.filler.wait(asked.values(), 60.0)
        began = time.perf_counter()
        masks, failures = compiler.filler.shared(matchers)
        assert not failures
        own = [i for i, mask in enumerate(masks) if mask is None]
        if own:
            compiler.filler.fill([matchers[i] for i in own], own, buffer)
        cost["masks"] += time.perf_counter() - began
        cost["own"] += len(own)
        tokens = []
        for i, mask in enumerate(masks):
            words = buffer[i] if mask is None else mask.words
            key = id(words)
            if mask is None or key not in ids_of:
                ids_of[key] = mask, bitmask.ids(words)
            ids = ids_of[key][1]
            tokens.append(int(ids[rng.integers(len(ids))]))
        began = time.perf_counter()
        verdicts = compiler.filler.advance(matchers, tokens)
        cost["accept"] += time.perf_counter() - began
        assert REFUSED not in verdicts
        began = time.perf_counter()
        for i, matcher in enumerate(matchers):
            if matcher.finished:
                matchers[i] = grammar.matcher()
            elif jump and (run := matcher.forced()):
                matcher.accept(run)
                cost["jumped"] += len(run)
        cost["forced"] += time.perf_counter() - began
    for name in ("masks", "accept", "forced"):
        cost[name] *= 1e6 / (rows * steps)  # pyright: ignore[reportArgumentType]
    return cost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokenizer")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--schema", default="")
    parser.add_argument("--jump", action="store_true")
    parser.add_argument("--asks", action="store_true", help="Masks are made in other threads; waiting is not counted.")
    given = parser.parse_args()
    schema = json.loads(Path(given.schema).read_text()) if given.schema else SCHEMA
    tokenizer = Tokenizer.from_folder(given.tokenizer)
    vocab = Vocab.of(tokenizer)
    compiler = GrammarCompiler(vocab, CompilerConfig(isolate=False, fill_threads=given.threads))
    for seed in range(3):
        cost = walk(compiler, schema, rows=given.rows, steps=given.steps, seed=seed, jump=given.jump, asks=given.asks)
        print(f"pass {seed}:", {name: round(value, 2) for name, value in sorted(cost.items())})


if __name__ == "__main__":
    main()
