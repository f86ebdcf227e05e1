"""What is met ahead is what the engine says, and a completion that follows finds it known."""

from __future__ import annotations

import random
import time

import pytest

from sglite.grammar import bitmask, spec
from sglite.grammar.automaton.ahead import draw, meet
from sglite.grammar.automaton.matcher import FollowedMatcher
from sglite.grammar.automaton.positions import Machine
from sglite.grammar.compiler import CompilerConfig, Grammar, GrammarCompiler
from sglite.grammar.engines import llguidance
from sglite.grammar.engines.llguidance import LLGuidanceGrammar
from sglite.grammar.matcher import Bitmask
from tests.grammar.automaton.test_followed import SCHEMAS, closed, text, tricky_vocab

PERSON = closed(name=text(20), age={"type": "integer"}, kind={"enum": ["left", "right"]})


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> GrammarCompiler:
    monkeypatch.setattr(llguidance, "_AHEAD_SECONDS", 10.0)
    return GrammarCompiler(tricky_vocab(), CompilerConfig(isolate=False))


def test_texts_that_are_drawn_follow_the_grammar() -> None:
    lark = 'start: "[" (item ("," item)*)? "]"\nitem: "true" | NUMBER\nNUMBER: /-?[0-9]{1,4}/\n'
    machine = Machine(lark, most_regexes=(1000, 1000), most_positions=1000, reach=8)
    texts = [draw(machine, random.Random(seed), 30, time.thread_time() + 9) for seed in range(40)]
    assert all(machine.follow(machine.start, data) is not None for data in texts)
    assert len(set(texts)) > 10
    assert any(data.endswith(b"]") for data in texts)


def test_a_completion_after_the_compile_asks_no_engine_at_usual_places(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile_now(spec.json_schema(PERSON))
    matcher = grammar.matcher()
    assert isinstance(matcher, FollowedMatcher)
    known = []
    for token_id in compiler.vocab.encode('{"name":"the","age":1,"kind":"left"}'):
        if matcher.state is not None and matcher.state.said.ahead == 0:
            known.append(matcher.known_mask() is not None)
        matcher.accept([token_id])
    assert len(known) > 2
    assert sum(known) >= len(known) - 1
    assert matcher._own is None, "no engine's matcher was made"


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_is_known_from_the_start_is_what_the_engine_says(compiler: GrammarCompiler, name: str) -> None:
    grammar = compiler.compile_now(spec.json_schema(SCHEMAS[name]))
    assert isinstance(grammar, Grammar)
    assert isinstance(grammar.base, LLGuidanceGrammar)
    automaton = grammar.base.automaton
    assert automaton is not None
    rng = random.Random(name)
    for _ in range(20):
        data = draw(automaton.machine, rng, 60, time.thread_time() + 9).decode(errors="ignore")
        matcher, exact = grammar.base.matcher(), grammar.base.exact_matcher()
        assert isinstance(matcher, FollowedMatcher)
        for token_id in compiler.vocab.encode(data):
            mask = matcher.known_mask()
            if mask is not None:
                row = bitmask.empty(compiler.vocab.size)
                exact.fill(row)
                assert (mask.words == row).all()
            if matcher.state is not None and matcher.state.said.forced is not None:
                assert list(matcher.state.said.forced) == exact.forced()
            assert matcher.accept([token_id]) == exact.accept([token_id])


def test_a_grammar_that_takes_long_is_left_for_later(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile_now(spec.json_schema(PERSON | {"description": "no time"}))
    assert isinstance(grammar, Grammar)
    assert isinstance(grammar.base, LLGuidanceGrammar)
    automaton = grammar.base.automaton
    assert automaton is not None
    automaton.forget()

    def nothing(matchers: object, rows: Bitmask) -> None:
        raise AssertionError("nothing was met")

    meet(grammar.base, compiler.vocab, nothing, nothing, texts=3, most=100, end=time.thread_time() - 1)
