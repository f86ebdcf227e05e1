"""Matchers of one grammar come from several templates, so that their masks are made in parallel."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from sglite.grammar import bitmask
from sglite.grammar.engines import llguidance, route
from sglite.grammar.engines.llguidance import LLGuidanceEngine, LLGuidanceGrammar, Spare, Templates
from sglite.grammar.fill import BatchFiller
from sglite.grammar.spec import json_schema
from sglite.grammar.vocab import Vocab

SPEC = json_schema({"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 3})


def grammar(parallel: int) -> LLGuidanceGrammar:
    return LLGuidanceEngine(Vocab.of_bytes(), parallel=parallel).compile(SPEC, route.plan(SPEC).grammar)


def test_as_many_lock_groups_as_fill_in_parallel() -> None:
    shared = grammar(4)
    made = {shared.exact_matcher().lock_group}
    end = time.monotonic() + 10
    while len(made) < 4 and time.monotonic() < end:  # they are made beside
        made.add(shared.exact_matcher().lock_group)
    while shared.templates._next:
        shared.exact_matcher()
    groups = [shared.exact_matcher().lock_group for _ in range(12)]
    assert len(set(groups)) == 4
    assert groups[:4] == groups[4:8] == groups[8:]
    alone = grammar(1)
    assert len({alone.exact_matcher().lock_group for _ in range(5)}) == 1


def test_a_fork_shares_the_lock_of_its_origin() -> None:
    matcher = grammar(4).exact_matcher()
    assert matcher.fork().lock_group == matcher.lock_group


def test_rows_get_their_own_mask_whatever_their_group() -> None:
    shared = grammar(4)
    matchers = [shared.exact_matcher() for _ in range(9)]
    for i, matcher in enumerate(matchers):
        matcher.accept(list(b'["abc'[: i % 6]))
    vocab = shared.vocab
    together = np.zeros((9, bitmask.words(vocab.size)), np.int32)
    rows = [8, 2, 5, 0, 1, 3, 7, 6, 4]
    assert BatchFiller(2).fill(matchers, rows, together) == {}
    alone = bitmask.empty(vocab.size)
    for matcher, row in zip(matchers, rows, strict=True):
        matcher.fill(alone)
        assert np.array_equal(together[row], alone)


def test_spare_templates_are_bounded_and_given_back() -> None:
    spare = Spare(1)
    first = grammar(1).exact_matcher().native
    made = Templates(first, first.deep_copy, most=8, spare=spare)
    end = time.monotonic() + 10
    while len({made.copy()[1] for _ in range(16)}) < 2 and time.monotonic() < end:
        time.sleep(0.001)
    assert len({made.copy()[1] for _ in range(16)}) == 2
    assert not spare.take()
    del made
    assert spare.take()


@pytest.mark.parametrize("slow", [False, True])
def test_a_first_token_that_takes_long_is_taken_with_the_compile(monkeypatch: pytest.MonkeyPatch, slow: bool) -> None:
    monkeypatch.setattr(llguidance, "_SLOW_FIRST_S", 0.0 if slow else 1e9)
    made = grammar(1)
    vocab = made.vocab
    assert made.start is not None
    assert bool(made.start.after) == slow
    start, row, expected = bitmask.empty(vocab.size), bitmask.empty(vocab.size), bitmask.empty(vocab.size)
    made.exact_matcher().fill(start)
    plain = replace(made, start=None)
    for token_id in bitmask.ids(start & ~vocab.stop_mask).tolist():
        matcher, other = made.exact_matcher(), plain.exact_matcher()
        assert matcher.accept([token_id]) == other.accept([token_id]) == 1
        assert matcher.forced() == other.forced()
        matcher.fill(row)
        other.fill(expected)
        assert np.array_equal(row, expected)
        matcher.rollback(1)
        matcher.fill(row)
        assert np.array_equal(row, start)
