"""How exact, how complete and how fast are constraints, beside the two engines used raw?

    python tests/bench/grammar.py DATA.jsonl.xz [--tokenizer FOLDER] [--every N] [--out benchmarks/grammar.md]

DATA holds one JSON object a line: `name`, `schema` and `tests`, a list of {"valid": bool, "data": any}. Each instance
is written compactly, keys in schema order (undeclared ones last), and given to every system byte by byte, then the end.
Coverage and correctness do not depend on the vocabulary and use one token a byte; times use the tokenizer's vocabulary
and are CPU time of this process, so that a busy machine does not show. A mask is timed at every token of the valid
instances. Prints the table and, as the last line, one JSON object.
"""

from __future__ import annotations

import argparse
import json
import lzma
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
import xgrammar

from sglite.errors import SgliteError
from sglite.grammar import bitmask, instance, spec
from sglite.grammar.compiler import CompilerConfig, GrammarCompiler
from sglite.grammar.engines.llguidance import LLGuidanceEngine
from sglite.grammar.schema import prepare
from sglite.grammar.vocab import Vocab
from sglite.text.tokenizer import Tokenizer

Cases = list[tuple[str, list[tuple[str, bool]]]]  # schema, instances and whether each is valid

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
        self._on_unsupported = on_unsupported

    def compile(self, schema: str) -> Position:
        try:
            wanted = spec.json_schema(schema, on_unsupported=self._on_unsupported)
            return _SglitePosition(self._compiler.compile_now(wanted))
        except SgliteError as error:
            raise Refused(type(error).__name__) from error


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
        return _XgrammarPosition(compiled)


class _XgrammarPosition(Position):
    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled
        self._native = xgrammar.GrammarMatcher(compiled)

    def fill(self, row: np.ndarray) -> None:
        self._native.fill_next_token_bitmask(row.reshape(1, -1))

    def accept(self, token_id: int) -> bool:
        return self._native.accept_token(token_id)

    def fresh(self) -> Position:
        return _XgrammarPosition(self._compiled)

    def accepts(self, token_ids: list[int], text: str) -> bool:
        return all(self._native.accept_token(i) for i in token_ids) and self._native.is_completed()


@dataclass
class Result:
    schemas: int = 0
    refused: int = 0
    valid: int = 0
    invalid: int = 0
    false_refusals: int = 0
    false_accepts: int = 0
    compile_ms: list[float] = field(default_factory=list)
    mask_us: list[float] = field(default_factory=list)

    def numbers(self) -> dict[str, float]:
        compile_ms, mask_us = np.array(self.compile_ms or [0.0]), np.array(self.mask_us or [0.0])
        return {
            "schemas": self.schemas,
            "refused": self.refused,
            "valid instances": self.valid,
            "invalid instances": self.invalid,
            "false refusals": self.false_refusals,
            "false accepts": self.false_accepts,
            "compiles timed": len(self.compile_ms),
            "compile p50 ms": round(float(np.percentile(compile_ms, 50)), 1),
            "compile p99 ms": round(float(np.percentile(compile_ms, 99)), 1),
            "masks timed": len(self.mask_us),
            "mask p50 us": round(float(np.percentile(mask_us, 50)), 1),
            "mask p99 us": round(float(np.percentile(mask_us, 99)), 1),
            "mask max us": round(float(mask_us.max()), 1),
        }


def lines(data: Path, every: int) -> Iterator[dict[str, Any]]:
    with lzma.open(data, "rt", encoding="utf-8") as file:
        for number, line in enumerate(file):
            if number % every == 0:
                yield json.loads(line)


def texts(line: dict[str, Any]) -> list[tuple[str, bool]]:
    """The instances as they are fed. A schema that our front end refuses gives no order: keys stay as they are."""
    try:
        reorder: Callable[[Any], Any] = prepare(json.dumps(line["schema"]), on_unsupported="validate").reorder
    except SgliteError:
        reorder = _as_is
    values = [(instance.parse(json.dumps(test["data"])), test["valid"]) for test in line["tests"]]
    return [(instance.compact(reorder(value)).decode(), valid) for value, valid in values]


def _as_is(value: Any) -> Any:
    return value


def measure_acceptance(system: System, cases: Cases) -> Result:
    result = Result()
    for schema, instances in cases:
        result.schemas += 1
        try:
            start = system.compile(schema)
        except Refused:
            result.refused += 1
            continue
        for text, valid in instances:
            accepted = start.fresh().accepts(list(text.encode()), text)
            result.valid += valid
            result.invalid += not valid
            result.false_refusals += valid and not accepted
            result.false_accepts += accepted and not valid
    return result


def measure_speed(
    system: System, vocab: Vocab, cases: list[tuple[str, list[tuple[str, bool]]]], result: Result
) -> None:
    row = bitmask.empty(vocab.size)
    for schema, instances in cases:
        started = time.process_time()
        try:
            start = system.compile(schema)
        except Refused:
            continue
        finally:
            result.compile_ms.append((time.process_time() - started) * 1e3)
        for text, valid in instances:
            if not valid:
                continue
            position = start.fresh()
            for token_id in vocab.encode(text):
                started = time.thread_time()
                position.fill(row)
                result.mask_us.append((time.thread_time() - started) * 1e6)
                if not position.accept(token_id):
                    break


def table(results: dict[str, dict[str, float]]) -> str:
    rows = next(iter(results.values())).keys()
    head = "| | " + " | ".join(results) + " |\n|---" + "|---:" * len(results) + "|\n"
    return head + "".join(
        f"| {name} | " + " | ".join(f"{results[system][name]:,g}" for system in results) + " |\n" for name in rows
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--tokenizer", type=Path, help="a folder with tokenizer.json: the vocabulary of the times")
    parser.add_argument("--vocab-size", type=int, help="the model's vocabulary size, with its padded tail")
    parser.add_argument("--every", type=int, default=1, help="take every Nth schema")
    parser.add_argument("--speed-every", type=int, default=10, help="time every Nth of these")
    parser.add_argument("--out", type=Path, help="write the report as markdown")
    options = parser.parse_args()
    cases = [(json.dumps(line["schema"]), texts(line)) for line in lines(options.data, options.every)]
    bytes_vocab = Vocab.of_bytes()
    makers: dict[str, Callable[[Vocab], System]] = {
        "sglite": lambda vocab: Sglite(vocab, "error"),
        "sglite, validate": lambda vocab: Sglite(vocab, "validate"),
        "llguidance": RawLlguidance,
        "xgrammar": RawXgrammar,
    }
    timed = (
        None
        if options.tokenizer is None
        else Vocab.of(Tokenizer.from_folder(options.tokenizer), vocab_size=options.vocab_size)
    )
    results: dict[str, dict[str, float]] = {}
    for name, make in makers.items():
        result = measure_acceptance(make(bytes_vocab), cases)
        if timed is not None:
            system = make(timed)
            system.compile('{"type":"object"}')  # tables that are made once
            measure_speed(system, timed, cases[:: options.speed_every], result)
        results[name] = result.numbers()
        print(name, results[name], flush=True)
    report = {
        "versions": {"llguidance": llguidance.get_version(), "xgrammar": version("xgrammar")},
        "python": platform.python_version(),
        "machine": platform.processor() or platform.machine(),
        "vocab": None if timed is None else timed.size,
        "results": results,
    }
    print(table(results))
    if options.out is not None:
        options.out.write_text(_markdown(report), encoding="utf-8")
    print(json.dumps(report))


def _markdown(report: dict[str, Any]) -> str:
    return f"""# Constraints: exact, complete, fast

Made by `tests/bench/grammar.py`; its head says what is measured and how. {report["versions"]["llguidance"]},
xgrammar {report["versions"]["xgrammar"]}, Python {report["python"]}, {report["machine"]}; times with a vocabulary of
{report["vocab"] or 0:,} tokens, in CPU time.

{table(report["results"])}
"""


if __name__ == "__main__":
    main()
