"""How exact, how complete and how fast are constraints, beside the two engines used raw?

    python tests/bench/grammar.py run DATA.jsonl.xz --system NAME --tokenizer FOLDER --results FOLDER [--part K/N]
    python tests/bench/grammar.py table --results FOLDER [--out benchmarks/grammar.md]

DATA holds one JSON object a line: `name`, `schema` and `tests`, a list of {"valid": bool, "data": any}. Each instance
is written compactly, keys in schema order (undeclared ones last), and given to the system byte by byte, then the end.
Coverage and correctness do not depend on the vocabulary and use one token a byte; times use the tokenizer's vocabulary
and are CPU time, so that a busy machine hardly shows. A mask is timed at every token of the first valid instances.

A system runs in a process of its own; a schema that keeps it busy for over LIMIT_SECONDS counts as one that hangs, and
the process is replaced. `run` appends one JSON line a schema to RESULTS/NAME.jsonl, so that parts can be run apart.
"""

from __future__ import annotations

import argparse
import gc
import json
import lzma
import platform
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

import llguidance
import numpy as np

from sglite.errors import GrammarViolation, SgliteError
from sglite.grammar import bitmask, instance, spec
from sglite.grammar.compiler import CompilerConfig, GrammarCompiler
from sglite.grammar.engines.llguidance import LLGuidanceEngine
from sglite.grammar.schema import prepare
from sglite.grammar.vocab import Vocab
from sglite.text.tokenizer import Tokenizer

_COMPACT = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}


class Refused(Exception):
    """The system will not take the schema."""


class System:
    """One way to constrain: `compile` gives a fresh position, or raises Refused."""

    def compile(self, schema: str) -> Position:
        raise NotImplementedError


class Position:
    def fill(self, row: np.ndarray) -> None:
        raise NotImplementedError

    def accept(self, token_id: int) -> bool:
        raise NotImplementedError

    def fresh(self) -> Position:
        raise NotImplementedError

    def accepts(self, token_ids: list[int], text: str) -> bool:
        raise NotImplementedError


class Sglite(System):
    def __init__(self, vocab: Vocab, on_unsupported: Any) -> None:
        self._compiler = GrammarCompiler(vocab, CompilerConfig(isolate=False, cache_bytes=0))
        # Each mask is made: nothing is remembered of an earlier completion, or met before the first one.
        self._compiler._llguidance_engine = LLGuidanceEngine(vocab, follow=False)
        self._on_unsupported = on_unsupported

    def compile(self, schema: str) -> Position:
        try:
            wanted = spec.json_schema(schema, on_unsupported=self._on_unsupported)
            grammar = self._compiler.compile_now(wanted)
        except SgliteError as error:
            raise Refused(type(error).__name__) from error
        return _SglitePosition(grammar)


class _SglitePosition(Position):
    def __init__(self, grammar: Any) -> None:
        self._grammar = grammar
        self._matcher = grammar.matcher()
        self.fill = self._matcher.fill

    def accept(self, token_id: int) -> bool:
        return self._matcher.accept([token_id]) == 1

    def fresh(self) -> Position:
        return _SglitePosition(self._grammar)

    def accepts(self, token_ids: list[int], text: str) -> bool:
        if self._matcher.accept(token_ids) < len(token_ids) or not self._matcher.can_stop:
            return False
        return self._grammar.coverage.exact or self._grammar.validate(text) is None


class RawLlguidance(System):
    def __init__(self, vocab: Vocab) -> None:
        self._tokenizer = LLGuidanceEngine(vocab)._tokenizer

    def compile(self, schema: str) -> Position:
        grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=_COMPACT)
        native = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)
        if native.is_error():
            raise Refused(native.get_error()[:80])
        return _LlguidancePosition(native)


class _LlguidancePosition(Position):
    def __init__(self, native: Any) -> None:
        self._native = native

    def fill(self, row: np.ndarray) -> None:
        self._native.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)

    def accept(self, token_id: int) -> bool:
        return self._native.try_consume_tokens([token_id]) == 1

    def fresh(self) -> Position:
        twin = self._native.deep_copy()
        twin.reset()
        return _LlguidancePosition(twin)

    def accepts(self, token_ids: list[int], text: str) -> bool:
        return self._native.try_consume_tokens(token_ids) == len(token_ids) and self._native.is_accepting()


class RawXgrammar(System):
    """Its masks made at first use; made ahead (its default), compiles take seconds and some schemas do not return."""

    def __init__(self, vocab: Vocab) -> None:
        import xgrammar  # brings torch: the other systems do without

        self._new = xgrammar.GrammarMatcher
        info = xgrammar.TokenizerInfo(list(vocab.tokens), vocab_size=vocab.size, stop_token_ids=list(vocab.stop_ids))
        self._compiler = xgrammar.GrammarCompiler(
            info, max_threads=1, cache_enabled=False, enable_dynamic_compilation=True
        )

    def compile(self, schema: str) -> Position:
        try:
            compiled = self._compiler.compile_json_schema(
                schema, any_whitespace=False, separators=(",", ":"), strict_mode=False
            )
        except (RuntimeError, ValueError) as error:
            raise Refused(str(error)[-80:]) from error
        return _XgrammarPosition(compiled, self._new)


class _XgrammarPosition(Position):
    def __init__(self, compiled: Any, new: Callable[[Any], Any]) -> None:
        self._compiled = compiled
        self._new = new
        self._native = new(compiled)

    def fill(self, row: np.ndarray) -> None:
        self._native.fill_next_token_bitmask(row.reshape(1, -1))

    def accept(self, token_id: int) -> bool:
        return self._native.accept_token(token_id)

    def fresh(self) -> Position:
        return _XgrammarPosition(self._compiled, self._new)

    def accepts(self, token_ids: list[int], text: str) -> bool:
        return all(self._native.accept_token(i) for i in token_ids) and self._native.is_completed()


SYSTEMS: dict[str, Callable[[Vocab], System]] = {
    "sglite": lambda vocab: Sglite(vocab, "error"),
    "sglite-validate": lambda vocab: Sglite(vocab, "validate"),
    "llguidance": RawLlguidance,
    "xgrammar": RawXgrammar,
}
LIMIT_SECONDS = 30.0  # of one schema
MOST_TIMED_TOKENS = 300  # of one schema

Cases = list[tuple[str, bool]]  # texts of instances, and whether each is valid


def lines(data: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with lzma.open(data, "rt", encoding="utf-8") as file:
        for number, line in enumerate(file):
            yield number, json.loads(line)


def texts(line: dict[str, Any]) -> Cases:
    """The instances as they are fed. A schema that our front end refuses gives no order: keys stay as they are."""
    try:
        reorder: Callable[[Any], Any] = prepare(json.dumps(line["schema"]), on_unsupported="validate").reorder
    except SgliteError:
        reorder = _as_is
    values = [(instance.parse(json.dumps(test["data"])), test["valid"]) for test in line["tests"]]
    return [(instance.compact(reorder(value)).decode(), valid) for value, valid in values]


def _as_is(value: Any) -> Any:
    return value


# --- in the system's process


def acceptance(system: System, schema: str, cases: Cases) -> dict[str, Any]:
    try:
        start = system.compile(schema)
    except Refused as error:
        return {"refused": str(error)}
    found: Counter[str] = Counter()
    for text, valid in cases:
        accepted = start.fresh().accepts(list(text.encode()), text)
        found["valid" if valid else "invalid"] += 1
        found["false refusals"] += valid and not accepted
        found["false accepts"] += accepted and not valid
    return dict(found)


def speed(system: System, vocab: Vocab, schema: str, cases: Cases) -> dict[str, Any]:
    row = bitmask.empty(vocab.size)
    gc.disable()  # as in the worker that plans; there is no garbage yet
    started = time.process_time()
    try:
        start = system.compile(schema)
    except Refused:
        return {}
    finally:
        compile_ms = (time.process_time() - started) * 1e3
        gc.enable()
    mask_us: list[float] = []
    for text in [text for text, valid in cases if valid]:
        position = start.fresh()
        for token_id in vocab.encode(text)[: MOST_TIMED_TOKENS - len(mask_us)]:
            started = time.thread_time()
            try:
                position.fill(row)
            except GrammarViolation:
                return {"compile_ms": round(compile_ms, 2), "mask_us": mask_us, "stopped": True}
            mask_us.append(round((time.thread_time() - started) * 1e6, 1))
            if not position.accept(token_id):
                break
    return {"compile_ms": round(compile_ms, 2), "mask_us": mask_us}


def serve(options: argparse.Namespace) -> None:
    """Measure one schema after another, from the number `--begin` on, one JSON line each on standard output."""
    make = SYSTEMS[options.system]
    timed = Vocab.of(Tokenizer.from_folder(options.tokenizer), vocab_size=options.vocab_size)
    over_bytes, over_tokens = make(Vocab.of_bytes()), make(timed)
    timed.warm()
    over_tokens.compile('{"type":"object"}')  # tables that are made once
    gc.collect()
    gc.freeze()
    part, parts = (int(number) for number in options.part.split("/"))
    for number, line in lines(options.data):
        if number < options.begin or number % parts != part:
            continue
        cases, schema = texts(line), json.dumps(line["schema"])
        gc.collect()
        print(json.dumps({"begun": number}), flush=True)
        found = acceptance(over_bytes, schema, cases) | speed(over_tokens, timed, schema, cases)
        print(json.dumps({"number": number, "name": line["name"], **found}), flush=True)


# --- around it


def run(options: argparse.Namespace) -> None:
    options.results.mkdir(parents=True, exist_ok=True)
    with (options.results / f"{options.system}.jsonl").open("a", encoding="utf-8") as out:
        begin: int | None = 0
        while begin is not None:
            begin = _run_from(options, begin, out)


def _run_from(options: argparse.Namespace, begin: int, out: TextIO) -> int | None:
    """From where to go on, after a schema that ended its process; None: done."""
    command = [sys.executable, __file__, "serve", str(options.data), "--system", options.system, "--part", options.part]
    command += ["--tokenizer", str(options.tokenizer), "--begin", str(begin)]
    command += [] if options.vocab_size is None else ["--vocab-size", str(options.vocab_size)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    at = begin
    try:
        while True:
            alarm = threading.Timer(LIMIT_SECONDS * 4, process.kill)  # wall time, on a machine that others use, too
            alarm.start()
            text = process.stdout.readline()
            alarm.cancel()
            if not text:
                break
            found = json.loads(text)
            if "begun" in found:
                at = found["begun"]
            else:
                out.write(text)
                out.flush()
    finally:
        process.kill()
    if process.wait() == 0:
        return None
    out.write(json.dumps({"number": at, "name": "", "refused": "hangs or crashes", "hangs": True}) + "\n")
    return at + 1


def summary(results: list[dict[str, Any]]) -> dict[str, float]:
    found: dict[str, float] = {
        "schemas": len(results),
        "refused": sum("refused" in result for result in results),
        "of these hang or crash": sum("hangs" in result for result in results),
        "stopped at a limit within a value": sum("stopped" in result for result in results),
    }
    for name in ("valid", "invalid", "false refusals", "false accepts"):
        found[name + (" instances" if "false" not in name else "")] = sum(result.get(name, 0) for result in results)
    compile_ms = np.array([result["compile_ms"] for result in results if "compile_ms" in result] or [0.0])
    mask_us = np.array([us for result in results for us in result.get("mask_us", ())] or [0.0])
    for percentile in (50, 99):
        found[f"compile p{percentile} ms"] = round(float(np.percentile(compile_ms, percentile)), 1)
    found["masks timed"] = len(mask_us)
    for percentile in (50, 99):
        found[f"mask p{percentile} us"] = round(float(np.percentile(mask_us, percentile)), 1)
    found["mask max us"] = round(float(mask_us.max()), 1)
    return found


def table(options: argparse.Namespace) -> None:
    results: dict[str, dict[str, float]] = {}
    for name in SYSTEMS:
        path = options.results / f"{name}.jsonl"
        if path.exists():
            with path.open(encoding="utf-8") as file:
                results[name] = summary([json.loads(line) for line in file])
    rows = next(iter(results.values())).keys()
    text = "| | " + " | ".join(results) + " |\n|---" + "|---:" * len(results) + "|\n"
    text += "".join(
        f"| {name} | " + " | ".join(f"{results[system][name]:,g}" for system in results) + " |\n" for name in rows
    )
    print(text)
    if options.out is not None:
        options.out.write_text(text, encoding="utf-8")
    versions = {name: version(name) for name in ("llguidance", "xgrammar")}
    print(json.dumps({"versions": versions, "python": platform.python_version(), "results": results}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for name, command in (("run", run), ("serve", serve)):
        sub = commands.add_parser(name)
        sub.set_defaults(command=command)
        sub.add_argument("data", type=Path)
        sub.add_argument("--system", choices=SYSTEMS, required=True)
        sub.add_argument("--tokenizer", type=Path, required=True, help="a folder with tokenizer.json")
        sub.add_argument("--vocab-size", type=int, help="the model's vocabulary size, with its padded tail")
        sub.add_argument("--part", default="0/1", help="K/N: every Nth schema, beginning with the Kth")
        sub.add_argument("--begin", type=int, default=0, help="the first schema's number")
        sub.add_argument("--results", type=Path, default=Path("results"))
    sub = commands.add_parser("table")
    sub.set_defaults(command=table)
    sub.add_argument("--results", type=Path, required=True)
    sub.add_argument("--out", type=Path, help="write the table as markdown")
    options = parser.parse_args()
    options.command(options)


if __name__ == "__main__":
    main()
