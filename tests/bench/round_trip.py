"""Does what a mask lets through validate, whatever is sampled?

    python tests/bench/round_trip.py DATA.jsonl.xz --tokenizer FOLDER [FOLDER ...] [--schemas 200] [--tokens 400]

DATA as for grammar.py. Every Nth schema is walked at random: each token uniformly among those that the mask allows,
with forced text taken as it comes every other time. After `--tokens` tokens the walk makes for the end. What is
complete is held against `jsonschema` (formats included) and must hold no key twice. Prints what fails and, as the last
line, one JSON object.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
import sys
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np

from sglite.errors import GrammarViolation, SgliteError
from sglite.grammar import bitmask, spec
from sglite.grammar.closing import JsonState
from sglite.grammar.compiler import CompilerConfig, GrammarCompiler
from sglite.grammar.matcher import Matcher
from sglite.grammar.vocab import Vocab
from sglite.text.tokenizer import Tokenizer

MOST_TO_END = 2_000  # tokens


def schemas(data: Path, count: int, part: str) -> Iterator[tuple[str, Any]]:
    with lzma.open(data, "rt", encoding="utf-8") as file:
        lines = file.readlines()
    first, step = (int(number) for number in part.split("/"))
    for line in lines[:: max(1, len(lines) // count)][first:count:step]:
        parsed = json.loads(line)
        yield parsed["name"], parsed["schema"]


def walk(matcher: Matcher, vocab: Vocab, rng: random.Random, *, most: int) -> bytes | None:
    """The bytes of a complete text; None where it did not end. Raises what the matcher raises."""
    row = bitmask.empty(vocab.size)
    written: list[int] = []
    state = JsonState()
    while not matcher.finished:
        forced = matcher.forced() if rng.random() < 0.5 else []
        if not forced:
            matcher.fill(row)
            if len(written) >= most and matcher.can_stop:
                break
            if len(written) < most:
                forced = [int(rng.choice(bitmask.ids(row)))]
            else:
                forced = [closing_token(row, vocab, state, rng)]
        if len(written) > most + MOST_TO_END:
            return None
        taken = matcher.accept(forced)
        if taken < len(forced):
            raise AssertionError(f"allowed but refused: {vocab.tokens[forced[taken]]!r} after {tail(written, vocab)!r}")
        if forced[-1] in vocab.stop_ids:
            break
        written += forced
        state = state.after(vocab.bytes_of(forced))
    return vocab.bytes_of(written)


def closing_token(row: np.ndarray, vocab: Vocab, state: JsonState, rng: random.Random) -> int:
    """A byte that mostly seems to lead to the end."""
    single = vocab.byte_ids
    allowed = single[(row[single >> 5] >> (single & 31)) & 1 == 1].tolist() or bitmask.ids(row).tolist()
    if rng.random() < 0.2:
        return rng.choice(allowed)
    order = b'"0a' if state.in_string else b'}],:0123456789"[{ntf-'
    ranks = [order.find(vocab.tokens[i][:1]) % 256 for i in allowed]
    best = min(ranks)
    return rng.choice([i for i, rank in zip(allowed, ranks, strict=True) if rank == best])


def tail(written: list[int], vocab: Vocab) -> bytes:
    return vocab.bytes_of(written)[-120:]


def violation(schema: Any, text: bytes) -> str | None:
    twice: list[str] = []

    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        counts = Counter(name for name, _ in found)
        twice.extend(name for name, count in counts.items() if count > 1)
        return dict(found)

    value = json.loads(text, object_pairs_hook=pairs)
    if twice:
        return f"the key {twice[0]!r} stands twice"
    cls = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    error = next(cls(schema, format_checker=cls.FORMAT_CHECKER).iter_errors(value), None)
    return None if error is None else f"{error.json_path}: {error.message[:200]}"


def check(compiler: GrammarCompiler, schema: Any, *, seed: int, most: int) -> str:
    """What came of one schema: "valid", "refused", "unfinished", or what is wrong."""
    try:
        grammar = compiler.compile_now(spec.json_schema(schema))
    except SgliteError:
        return "refused"
    try:
        text = walk(grammar.matcher(), compiler.vocab, random.Random(seed), most=most)
    except (GrammarViolation, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    if text is None:
        return "unfinished"
    try:
        return violation(schema, text) or "valid"
    except (jsonschema.exceptions.RefResolutionError, jsonschema.SchemaError) as error:
        return f"not checked: {type(error).__name__}"
    except ValueError as error:
        return f"{error}: {text[-200:]!r}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--tokenizer", type=Path, nargs="+", required=True)
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--part", default="0/1", help="K/N: every Nth of these, beginning with the Kth")
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    results: dict[str, dict[str, int]] = {}
    for folder in options.tokenizer:
        vocab = Vocab.of(Tokenizer.from_folder(folder))
        compiler = GrammarCompiler(vocab, CompilerConfig(isolate=False))
        counts: Counter[str] = Counter()
        for name, schema in schemas(options.data, options.schemas, options.part):
            for seed in range(options.seeds):
                outcome = check(compiler, schema, seed=seed, most=options.tokens)
                known = outcome if outcome in ("valid", "refused", "unfinished") else outcome.partition(":")[0]
                counts[known] += 1
                if known not in ("valid", "refused"):
                    print(f"{name} seed {seed}: {outcome}", flush=True)
        compiler.close()
        results[f"{vocab.size} tokens"] = dict(counts)
        print(folder.name, dict(counts), flush=True)
    print(json.dumps({"jsonschema": version("jsonschema"), "results": results}))
    sys.exit(any(set(counts) - {"valid", "refused", "unfinished", "not checked"} for counts in results.values()))


if __name__ == "__main__":
    main()
