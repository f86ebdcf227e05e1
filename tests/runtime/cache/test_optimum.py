"""The best cache in hindsight, against a slow and plain account of the same."""

from __future__ import annotations

import random

import numpy as np
import pytest

from sglite.runtime.cache.optimum import Access, distinct_tokens, optimal_hits


def access(text: str, num_read: int | None = None) -> Access:
    return Access(np.frombuffer(text.encode(), np.uint8).astype(np.int32), len(text) if num_read is None else num_read)


def plain_hits(accesses: list[Access], capacity: int) -> int:
    """Belady's MIN token by token: a token is named by all that comes up to it."""
    named = [[tuple(a.tokens[: i + 1].tolist()) for i in range(len(a.tokens))] for a in accesses]
    cached: set[tuple[int, ...]] = set()
    hits = 0
    for now, (one, names) in enumerate(zip(accesses, named, strict=True)):
        read = names[: one.num_read]
        hits += next((i for i, name in enumerate(read) if name not in cached), len(read))
        cached.update(names)

        def next_read(name: tuple[int, ...], now: int = now) -> tuple[int, int]:
            later = (t for t in range(now + 1, len(accesses)) if name in named[t][: accesses[t].num_read])
            return next(later, len(accesses)), len(name)

        cached = set(sorted(cached, key=next_read)[:capacity])
    return hits


def test_with_room_for_all_everything_but_the_first_time_is_a_hit() -> None:
    accesses = [access("abcd"), access("abxy"), access("abcd")]
    assert distinct_tokens([a.tokens for a in accesses]) == 6
    assert optimal_hits(accesses, 100) == 2 + 4


def test_what_is_read_last_goes_first() -> None:
    accesses = [access("aaa"), access("bbb"), access("ccc"), access("aaa"), access("bbb")]
    assert optimal_hits(accesses, 6) == 6  # ccc is not read again and need not stay
    assert optimal_hits(accesses, 5) == 5  # of bbb, which comes later, two stay
    assert optimal_hits(accesses, 0) == 0


def test_an_output_is_not_read_and_a_prompts_last_token_neither() -> None:
    assert optimal_hits([access("ab", 1), access("abcd", 3), access("abcdef", 5)], 10) == 0 + 2 + 4


@pytest.mark.parametrize("seed", range(20))
def test_it_counts_what_the_plain_account_counts(seed: int) -> None:
    dice = random.Random(seed)
    accesses: list[Access] = []
    for _ in range(12):
        begin = dice.choice(accesses).tokens if accesses and dice.random() < 0.7 else np.empty(0, np.int32)
        begin = begin[: dice.randrange(len(begin) + 1)] if dice.random() < 0.5 else begin
        own = np.array([dice.randrange(3) for _ in range(dice.randrange(1, 6))], np.int32)
        tokens = np.concatenate([begin, own])
        accesses.append(Access(tokens, dice.randrange(len(tokens) + 1)))
    for capacity in (0, 3, 7, 15, 1000):
        assert optimal_hits(accesses, capacity) == plain_hits(accesses, capacity)
