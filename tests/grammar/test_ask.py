"""Masks made in other threads are what the matchers would fill themselves."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from sglite.errors import GrammarViolation
from sglite.grammar import bitmask, spec
from sglite.grammar.automaton.matcher import FollowedMatcher
from sglite.grammar.compiler import CompilerConfig, Grammar, GrammarCompiler
from sglite.grammar.engines import llguidance
from sglite.grammar.engines.llguidance import LLGuidanceGrammar, LLGuidanceMatcher
from sglite.grammar.matcher import REFUSED, Matcher
from tests.grammar.automaton.test_followed import SCHEMAS, both_of, odd_first, tricky_vocab


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[GrammarCompiler]:
    monkeypatch.setattr(llguidance, "_AHEAD_TEXTS", 0)  # nothing is known of a new constraint
    made = GrammarCompiler(tricky_vocab(), CompilerConfig(isolate=False))
    yield made
    made.close()


def walked(compiler: GrammarCompiler, name: str, *, engines: bool, seed: int) -> Matcher:
    """At some place, of a constraint that nothing is remembered of."""
    followed, exact = both_of(compiler, spec.json_schema(SCHEMAS[name] | {"description": f"{name} {engines} {seed}"}))
    matcher = exact if engines else followed
    rng = random.Random(seed)
    row = bitmask.empty(compiler.vocab.size)
    for _ in range(rng.randint(1, 12)):
        exact.fill(row)
        token_id = odd_first(rng, bitmask.ids(row).tolist(), compiler.vocab)
        if token_id in compiler.vocab.stop_ids:
            break
        exact.accept([token_id])
        if matcher is not exact:
            matcher.accept([token_id])
    return matcher


def expected(matcher: Matcher, size: int) -> np.ndarray:
    row = bitmask.empty(size)
    matcher.fork().fill(row)
    return row


@pytest.mark.parametrize("engines", [False, True], ids=["followed", "engine's"])
def test_masks_that_were_asked_for_are_found_by_fill_and_shared(compiler: GrammarCompiler, engines: bool) -> None:
    size, filler = compiler.vocab.size, compiler.filler
    matchers = [walked(compiler, name, engines=engines, seed=i) for i, name in enumerate(SCHEMAS) for _ in range(2)]
    asked = filler.begin(matchers)
    assert asked
    filler.wait(asked.values(), 10.0)
    assert all(ask.done for ask in asked.values())
    assert not filler.begin(matchers), "they are there"
    rows = np.zeros((len(matchers), bitmask.words(size)), np.int32)
    masks, failures = filler.shared(matchers)
    assert not failures
    own = [i for i, mask in enumerate(masks) if mask is None]
    assert not filler.fill([matchers[i] for i in own], own, rows)
    for matcher, mask, row in zip(matchers, masks, rows, strict=True):
        assert np.array_equal(row if mask is None else mask.words, expected(matcher, size))


def test_one_is_asked_for_all_that_stand_at_the_same_place(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile_now(spec.json_schema(SCHEMAS["numbers"] | {"description": "the same place"}))
    matchers = [grammar.matcher() for _ in range(5)]
    for matcher in matchers:
        matcher.accept(compiler.vocab.encode('{"age":1'))
    asked = compiler.filler.begin(matchers)
    assert len(asked) == 5
    assert len({id(ask) for ask in asked.values()}) == 1
    compiler.filler.wait(asked.values(), 10.0)


def test_while_one_is_made_nobody_waits(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, quick = (walked(compiler, "patterns", engines=True, seed=seed) for seed in (1, 2))
    go_on = threading.Event()
    fill_native = compiler.filler._asks._fill_native

    def held_up(bases: list[tuple[LLGuidanceMatcher, int]], rows: np.ndarray) -> None:
        if any(own is slow for own, _ in bases):
            assert go_on.wait(10.0)
        fill_native(bases, rows)

    monkeypatch.setattr(compiler.filler._asks, "_fill_native", held_up)
    asked = compiler.filler.begin([slow])
    compiler.filler.wait(asked.values(), 0.001)
    assert not asked[0].done
    beside = compiler.filler.begin([slow, quick])
    compiler.filler.wait([beside[1]], 10.0)
    assert (beside[0].done, beside[1].done) == (False, True)
    assert beside[0] is asked[0]
    go_on.set()
    compiler.filler.wait(asked.values(), 10.0)
    rows = np.zeros((2, bitmask.words(compiler.vocab.size)), np.int32)
    assert not compiler.filler.begin([slow, quick])
    assert not compiler.filler.fill([slow, quick], [0, 1], rows)
    assert np.array_equal(rows[0], expected(slow, compiler.vocab.size))
    assert np.array_equal(rows[1], expected(quick, compiler.vocab.size))


def test_what_was_made_for_a_place_is_not_used_at_another(compiler: GrammarCompiler) -> None:
    matcher = walked(compiler, "short strings", engines=True, seed=3)
    compiler.filler.wait(compiler.filler.begin([matcher]).values(), 10.0)
    row = expected(matcher, compiler.vocab.size)
    legal = [i for i in bitmask.ids(row).tolist() if i not in compiler.vocab.stop_ids]
    matcher.accept([legal[-1]])
    rows = np.zeros((1, bitmask.words(compiler.vocab.size)), np.int32)
    assert not compiler.filler.fill([matcher], [0], rows)
    assert np.array_equal(rows[0], expected(matcher, compiler.vocab.size))


def test_a_matcher_that_fails_is_told_by_fill(compiler: GrammarCompiler) -> None:
    class Limited(LLGuidanceMatcher):
        def accept(self, token_ids: object) -> int:
            return 0

    grammar = compiler.compile_now(spec.json_schema(SCHEMAS["patterns"] | {"description": "one that fails"}))
    assert isinstance(grammar, Grammar)
    assert isinstance(grammar.base, LLGuidanceGrammar)
    bad, good = grammar.matcher(), grammar.matcher()
    assert isinstance(bad, FollowedMatcher)
    for matcher in (bad, good):
        matcher.accept(compiler.vocab.encode('{"name":"'))
    bad._own, bad._behind = Limited(grammar.base.exact_matcher().native, compiler.vocab), 0
    asked = compiler.filler.begin([bad])
    compiler.filler.wait(asked.values(), 10.0)
    assert asked[0].done
    masks, failures = compiler.filler.shared([bad])
    assert isinstance(failures.get(0), GrammarViolation)
    assert masks == [None]
    masks, failures = compiler.filler.shared([good])
    assert not failures
    assert masks[0] is not None


def test_what_is_forced_is_told_beside_the_mask_and_not_before(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile_now(spec.json_schema(SCHEMAS["short strings"] | {"description": "forced text"}))
    matcher = grammar.matcher()
    assert isinstance(matcher, FollowedMatcher)
    compiler.filler.wait(compiler.filler.begin([matcher]).values(), 10.0)
    start = compiler.vocab.encode('{"name":"a"')
    assert matcher.accept(start[:-1]) == len(start) - 1
    assert compiler.filler.advance([matcher], start[-1:]) == [0]
    asked = compiler.filler.begin([matcher])
    compiler.filler.wait(asked.values(), 10.0)
    assert matcher.state is not None
    compiler.filler._asks._forced_pool.shutdown(wait=True)
    assert not compiler.filler.begin([matcher])
    assert matcher.state.said.forced == tuple(matcher.exact.forced())
    assert matcher.ahead > 0


def test_no_mask_waits_for_forced_text(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    matcher = walked(compiler, "short strings", engines=False, seed=0)
    assert isinstance(matcher, FollowedMatcher)
    matcher.rollback(len(matcher.tokens))
    monkeypatch.setattr(LLGuidanceMatcher, "forced", lambda self: [] if go_on.wait(10.0) else [0])
    matcher.accept(compiler.vocab.encode('{"name":"a"'))
    assert matcher.asks_forced
    asked = compiler.filler.begin([matcher])
    compiler.filler.wait(asked.values(), 10.0)
    assert asked[0].done
    assert matcher.known_mask() is not None
    assert matcher.asks_forced
    go_on.set()


def test_who_is_alone_makes_its_masks_itself(compiler: GrammarCompiler) -> None:
    matcher = walked(compiler, "short strings", engines=False, seed=0)
    assert isinstance(matcher, FollowedMatcher)
    matcher.rollback(len(matcher.tokens))
    matcher.accept(compiler.vocab.encode('{"name":"a"'))
    assert not compiler.filler.begin([matcher], alone=True)
    assert compiler.filler._asks.idle
    (mask,), failures = compiler.filler.shared([matcher])
    assert not failures
    assert mask is not None
    assert np.array_equal(mask.words, expected(matcher.exact, compiler.vocab.size))
    compiler.filler._asks._forced_pool.shutdown(wait=True)
    assert not compiler.filler.begin([matcher], alone=True)
    assert matcher.state is not None
    assert matcher.state.said.forced == tuple(matcher.exact.forced()), "and what is forced there is told later"


def test_what_comes_after_its_matcher_has_moved_on_is_kept_for_where_it_was(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile_now(spec.json_schema(SCHEMAS["short strings"] | {"description": "moved on"}))
    matcher = grammar.matcher()
    assert isinstance(matcher, FollowedMatcher)
    matcher.accept(compiler.vocab.encode('{"name":"a"'))
    before, expected_row = matcher.state, expected(matcher.exact, compiler.vocab.size)
    assert before is not None
    asked = compiler.filler.begin([matcher])
    while not asked[0].done:
        pass
    legal = bitmask.ids(expected_row).tolist()
    assert matcher.accept(legal[:1]) == 1
    after = matcher.state
    assert after is not None
    compiler.filler.wait((), 0.0)
    assert before.said.mask is not None
    assert np.array_equal(before.said.mask.words, expected_row)
    assert after.said.mask is None or np.array_equal(
        after.said.mask.words, expected(matcher.exact, compiler.vocab.size)
    )


@pytest.mark.parametrize("name", ["short strings", "alternatives", "nested", "patterns with bounds"])
def test_rows_that_go_on_while_others_are_late_see_what_the_engine_says(compiler: GrammarCompiler, name: str) -> None:
    vocab, filler, rng = compiler.vocab, compiler.filler, random.Random(name)
    wanted = spec.json_schema(SCHEMAS[name] | {"description": "late ones"})
    pairs = [both_of(compiler, wanted) for _ in range(8)]
    rows = np.zeros((len(pairs), bitmask.words(vocab.size)), np.int32)
    for _ in range(40):
        asked = filler.begin([followed for followed, _ in pairs])
        filler.wait(asked.values() if rng.random() < 0.4 else (), rng.choice((0.0, 10.0)))
        ready = [i for i in range(len(pairs)) if i not in asked or asked[i].done]
        masks, failures = filler.shared([pairs[i][0] for i in ready])
        assert not failures
        drawn: list[int] = []
        for i, mask in zip(ready, masks, strict=True):
            followed, exact = pairs[i]
            if mask is None:
                assert not filler.fill([followed], [i], rows)
            words = rows[i] if mask is None else mask.words
            assert np.array_equal(words, expected(exact, vocab.size))
            drawn.append(odd_first(rng, bitmask.ids(words).tolist(), vocab))
            assert exact.accept(drawn[-1:]) == 1
        assert REFUSED not in filler.advance([pairs[i][0] for i in ready], drawn)
        for i in ready:
            if pairs[i][1].finished:
                pairs[i] = both_of(compiler, wanted)


def test_what_comes_first_is_told_by_the_compile(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (spec.json_schema(SCHEMAS["numbers"]), spec.lark('start: "ab" /[a-z]+/'), spec.regex("a(b|c)")):
        grammar = compiler.compile_now(kind)
        assert isinstance(grammar, Grammar)
        assert isinstance(grammar.base, LLGuidanceGrammar)
        matcher = grammar.base.exact_matcher()
        plain = LLGuidanceMatcher(matcher.native.deep_copy(), compiler.vocab, forces=grammar.base.forces)
        row, other = bitmask.empty(compiler.vocab.size), bitmask.empty(compiler.vocab.size)
        matcher.fill(row)
        plain.fill(other)
        assert np.array_equal(row, other)
        assert matcher.forced() == plain.forced()
        assert not compiler.filler.begin([matcher]), "nobody has to be asked"
        rows = np.zeros((1, bitmask.words(compiler.vocab.size)), np.int32)
        assert not compiler.filler.fill([matcher], [0], rows)
        assert np.array_equal(rows[0], other)
        first = bitmask.ids(row).tolist()[0]
        assert matcher.accept([first]) == plain.accept([first]) == 1
        matcher.fill(row)
        plain.fill(other)
        assert np.array_equal(row, other)
        assert matcher.forced() == plain.forced()
        matcher.rollback(1)
        assert matcher.start is not None
