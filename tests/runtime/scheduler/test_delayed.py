from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from sglite.errors import InvalidRequest
from sglite.grammar import spec
from sglite.grammar.budget import BudgetMatcher
from sglite.grammar.compiler import CompilerConfig, GrammarCompiler
from sglite.grammar.vocab import Vocab
from sglite.runtime.scheduler.delayed import DelayedMatcher
from tests.fakes.matcher import STOP_IDS, TextsMatcher

WORDS = 9


def _allowed(matcher: DelayedMatcher) -> set[int]:
    row = np.zeros(WORDS, np.int32)
    matcher.fill(row)
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[:259]).tolist())


def _matcher(budget: int | None = None) -> DelayedMatcher:
    return DelayedMatcher(TextsMatcher([b"yes", b"no"]), (7, 8), budget=budget, stop_ids=STOP_IDS)


def test_everything_but_the_end_is_free_before_the_marker() -> None:
    matcher = _matcher()
    assert _allowed(matcher) == set(range(257 - 1)) | {256}
    assert matcher.accept([1, 7, 2, 257]) == 3
    assert not matcher.can_stop
    assert matcher.forced() == []
    assert matcher.accept([7, 8]) == 2
    assert _allowed(matcher) == {ord("y"), ord("n")}
    assert matcher.accept(list(b"no")) == 2
    assert matcher.finished


def test_a_spent_budget_forces_what_is_missing_of_the_marker() -> None:
    matcher = _matcher(budget=3)
    matcher.accept([1, 2, 7])
    assert matcher.forced() == [8]
    assert _allowed(matcher) == {8}
    assert matcher.accept([9]) == 0
    assert matcher.accept([8]) == 1
    assert matcher.num_free == 4
    assert _allowed(matcher) == {ord("y"), ord("n")}


def test_rollback_undoes_accept_across_the_marker() -> None:
    matcher = _matcher()
    matcher.accept([5, 7])
    before = _allowed(matcher)
    twin = matcher.fork()
    matcher.accept([8, *b"ye"])
    matcher.rollback(3)
    assert _allowed(matcher) == before == _allowed(twin)
    assert matcher.accept([8, *b"no"]) == twin.accept([8, *b"no"]) == 3


def test_without_a_grammar_it_only_bounds_the_thinking() -> None:
    matcher = DelayedMatcher(None, (7,), budget=2, stop_ids=STOP_IDS)
    matcher.accept([1, 2])
    assert matcher.forced() == [7]
    matcher.accept([7, 1, 257])
    assert matcher.can_stop
    assert not matcher.finished
    assert len(_allowed(matcher)) == 259


def test_a_delay_needs_a_marker() -> None:
    with pytest.raises(AssertionError):
        DelayedMatcher(None, (), budget=None, stop_ids=STOP_IDS)


def _budgeted(compiler: GrammarCompiler, budget: int) -> BudgetMatcher:
    matcher = compiler.compile_now(spec.choice(["yes indeed", "no"])).matcher(budget=budget)
    assert isinstance(matcher, BudgetMatcher)
    return matcher


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(Vocab.of_bytes(), CompilerConfig(isolate=False))
    yield compiler
    compiler.close()


def test_thinking_ends_while_the_answer_still_fits(compiler: GrammarCompiler) -> None:
    matcher = DelayedMatcher(_budgeted(compiler, 9), (7, 8), budget=None, stop_ids=STOP_IDS)
    assert matcher.accept([1] * 9) == 5
    assert matcher.forced()[:2] == [7, 8]
    assert matcher.accept([7, 8]) == 2
    assert _allowed(matcher) == {ord("n")}, "the longer answer does not fit"
    matcher.rollback(6)
    assert matcher.accept([7, 8]) == 2
    assert matcher.fork().accept(list(b"no")) == 2


def test_thinking_may_be_short_and_the_answer_long(compiler: GrammarCompiler) -> None:
    matcher = DelayedMatcher(_budgeted(compiler, 60), (7, 8), budget=None, stop_ids=STOP_IDS)
    assert matcher.accept([1, 7, 8]) == 3
    assert _allowed(matcher) == {ord("n"), ord("y")}


def test_a_budget_without_room_for_marker_and_answer_is_refused(compiler: GrammarCompiler) -> None:
    with pytest.raises(InvalidRequest, match="max_tokens"):
        DelayedMatcher(_budgeted(compiler, 3), (7, 8), budget=None, stop_ids=STOP_IDS)
