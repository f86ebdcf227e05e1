from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from sglite.errors import GrammarViolation
from sglite.grammar import bitmask
from sglite.grammar.matcher import Bitmask
from tests.grammar.helpers import SPECS, random_walk, row_of


class Stuck:
    """A matcher whose mask cannot be made."""

    def fill(self, row: Bitmask) -> None:
        raise GrammarViolation("no way on")

    def accept(self, token_ids: Sequence[int]) -> int:
        return 0

    def rollback(self, num_tokens: int) -> None: ...

    def fork(self) -> Stuck:
        return self

    def forced(self) -> list[int]:
        return []

    can_stop = finished = False


class WithoutOdd:
    """A layer that forbids odd ids."""

    def __init__(self, below) -> None:
        self.below = below
        self.accept, self.rollback, self.forced = below.accept, below.rollback, below.forced
        self.can_stop, self.finished, self.fork = below.can_stop, below.finished, below.fork

    def fill(self, row: Bitmask) -> None:
        self.below.fill(row)
        self.finish_fill(row)

    def finish_fill(self, row: Bitmask) -> None:
        row &= 0x55555555


@pytest.mark.parametrize("seed", range(3))
def test_a_batch_gives_each_row_what_its_matcher_gives_alone(compiler, seed):
    rng = random.Random(seed)
    size = compiler.vocab.size
    matchers = []
    for kind in sorted(SPECS) * 4:
        matcher = compiler.compile_now(SPECS[kind]).matcher()
        random_walk(matcher, size, steps=rng.randint(0, 8), rng=rng)
        matchers.append(matcher if rng.random() < 0.7 else WithoutOdd(matcher))
    rows = rng.sample(range(40), len(matchers))
    buffer = np.full((40, bitmask.words(size)), 7, dtype=np.int32)
    assert compiler.filler.fill(matchers, rows, buffer) == {}
    for matcher, row in zip(matchers, rows, strict=True):
        assert np.array_equal(buffer[row], row_of(matcher, size))
    for row in set(range(40)) - set(rows):
        assert (buffer[row] == 7).all(), "a row that was not asked for"


def test_a_row_that_fails_harms_no_other(compiler):
    size = compiler.vocab.size
    good = [compiler.compile_now(SPECS[kind]).matcher() for kind in ("regex", "ebnf", "json_schema")]
    buffer = bitmask.empty(size, rows=5)
    failures = compiler.filler.fill([good[0], Stuck(), good[1], Stuck(), good[2]], [4, 3, 2, 1, 0], buffer)
    assert sorted(failures) == [1, 3]
    assert all(isinstance(error, GrammarViolation) for error in failures.values())
    for matcher, row in zip(good, (4, 2, 0), strict=True):
        assert np.array_equal(buffer[row], row_of(matcher, size))


def test_nothing_to_fill_is_fine(compiler):
    assert compiler.filler.fill([], [], bitmask.empty(compiler.vocab.size, rows=1)) == {}


def test_copies_of_one_grammar_are_filled_at_once(compiler):
    """R65: 32 requests with the same schema, each at a place of its own."""
    size = compiler.vocab.size
    grammar = compiler.compile_now(SPECS["json_schema"])
    matchers = [grammar.matcher() for _ in range(32)]
    rng = random.Random(0)
    buffer = bitmask.empty(size, rows=32)
    for _ in range(30):
        assert compiler.filler.fill(matchers, range(32), buffer) == {}
        for matcher, row in zip(matchers, buffer, strict=True):
            assert matcher.accept([rng.choice(bitmask.ids(row).tolist())]) == 1
