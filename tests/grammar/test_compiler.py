from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest

from sglite.errors import GrammarTimeout, GrammarTooLarge, InvalidGrammar, SgliteError
from sglite.grammar import spec
from sglite.grammar.compiler import CompilerConfig, GrammarCompiler
from sglite.grammar.engines import route
from sglite.grammar.matcher import CompiledGrammar
from sglite.grammar.vocab import Vocab
from sglite.protocol import GrammarSpec

MakeCompiler = Callable[..., GrammarCompiler]


@pytest.fixture
def make() -> Iterator[MakeCompiler]:
    made: list[GrammarCompiler] = []

    def make(**config: object) -> GrammarCompiler:
        made.append(GrammarCompiler(Vocab.of_bytes(), CompilerConfig(**{"isolate": False, **config})))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for compiler in made:
        compiler.close()


def count_plans(monkeypatch: pytest.MonkeyPatch, *, delay: float = 0.0) -> list[GrammarSpec]:
    planned: list[GrammarSpec] = []
    plan = route.plan

    def counted(wanted: GrammarSpec) -> route.Plan:
        planned.append(wanted)
        time.sleep(delay)
        return plan(wanted)

    monkeypatch.setattr(route, "plan", counted)
    return planned


def test_the_same_spec_asked_often_at_once_compiles_once(make, monkeypatch):
    planned = count_plans(monkeypatch, delay=0.05)
    compiler = make()
    wanted = spec.json_schema({"type": "integer"})
    results: list[CompiledGrammar] = []
    threads = [threading.Thread(target=lambda: results.append(compiler.compile_now(wanted))) for _ in range(100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(planned) == 1
    assert len(results) == 100
    assert len({id(result) for result in results}) == 1
    assert compiler.compile(wanted).done()


def test_each_completion_has_its_own_matcher(make):
    grammar = make().compile_now(spec.regex("ab"))
    first, second = grammar.matcher(), grammar.matcher()
    first.accept([97])
    assert second.accept([98]) == 0
    assert second.accept([97, 98]) == 2


def test_a_refusal_is_remembered(make, monkeypatch):
    planned = count_plans(monkeypatch)
    compiler = make()
    never = spec.regex(r"[^\s\S]")
    for _ in range(2):
        with pytest.raises(InvalidGrammar, match="no text"):
            compiler.compile_now(never)
    assert len(planned) == 1


def test_a_time_out_is_tried_again(make, monkeypatch):
    compiler = make()
    wanted = spec.json_schema({"type": "integer"})
    plan = route.plan

    def slow(wanted: GrammarSpec) -> route.Plan:
        raise GrammarTimeout("too slow this time")

    monkeypatch.setattr(route, "plan", slow)
    with pytest.raises(GrammarTimeout):
        compiler.compile_now(wanted)
    monkeypatch.setattr(route, "plan", plan)
    assert compiler.compile_now(wanted).matcher().accept([49]) == 1


@pytest.mark.parametrize(
    "raised", [RuntimeError("c++"), ValueError("x"), KeyError("k"), AssertionError(), OSError("gone")]
)
def test_whatever_an_engine_raises_ends_one_request(make, monkeypatch, raised, caplog):
    def broken(wanted: GrammarSpec) -> route.Plan:
        raise raised

    compiler = make()
    with monkeypatch.context() as patch, caplog.at_level(logging.CRITICAL):
        patch.setattr(route, "plan", broken)
        with pytest.raises(SgliteError, match="could not be compiled"):
            compiler.compile_now(spec.regex("a"))
    assert compiler.compile_now(spec.regex("a")).matcher().accept([97]) == 1


def test_the_cache_is_capped_in_bytes_and_drops_what_was_used_longest_ago(make, monkeypatch):
    planned = count_plans(monkeypatch)
    compiler = make(cache_bytes=300_000)
    kept = spec.json_schema({"title": "kept", "type": "null"})
    for number in range(30):
        compiler.compile_now(spec.json_schema({"title": str(number), "type": "integer"}))
        compiler.compile_now(kept)
        assert compiler.cached_bytes <= 300_000
    assert planned.count(kept) == 1
    compiler.compile_now(spec.json_schema({"title": "0", "type": "integer"}))
    assert len(planned) == 32


def test_compiling_after_close_is_an_error_and_nobody_waits_for_ever(make, monkeypatch):
    count_plans(monkeypatch, delay=0.1)
    compiler = make(num_threads=1)
    flights: list[Future[CompiledGrammar]] = [compiler.compile(spec.regex(f"a{{{n}}}")) for n in range(1, 6)]
    compiler.close()
    for flight in flights:
        assert flight.exception(timeout=5) is None or isinstance(flight.exception(), SgliteError)
    with pytest.raises(SgliteError, match="closed"):
        compiler.compile(spec.regex("b"))


@pytest.fixture(scope="module")
def isolated() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(Vocab.of_bytes(), CompilerConfig(quick_seconds=0.2, cpu_seconds=0.4))
    yield compiler
    compiler.close()


def test_a_schema_comes_back_as_a_grammar(isolated):
    grammar = isolated.compile_now(spec.json_schema({"type": "object", "properties": {"a": {"type": "null"}}}))
    assert grammar.coverage.exact
    assert [item.pointer for item in grammar.coverage.items][0] == "/type"
    assert grammar.matcher().accept(list(b'{"a":null}')) == 10


def test_a_refusal_comes_back_with_its_pointer(isolated):
    with pytest.raises(SgliteError) as caught:
        isolated.compile_now(spec.json_schema({"$ref": "https://example.com/x"}))
    assert caught.value.pointer == "/$ref"  # type: ignore[attr-defined]


def test_what_takes_too_long_is_ended_and_others_go_on(isolated, monkeypatch):
    wanted = spec.json_schema({"enum": [f"option {n}" for n in range(200_000)]})
    flight = isolated.compile(wanted)
    started = time.monotonic()
    for number in range(5):
        isolated.compile_now(spec.json_schema({"const": number}))
    assert time.monotonic() - started < 10
    with pytest.raises((GrammarTimeout, GrammarTooLarge)):
        flight.result(timeout=60)
    assert isolated.compile_now(spec.json_schema({"const": "after"})).matcher().accept([34]) == 1
