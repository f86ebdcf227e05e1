"""The tree against a plain dictionary of prefixes."""

from __future__ import annotations

import random

import numpy as np
import pytest

from sglite.runtime.cache.eviction import LRU, LeaseThenLRU
from sglite.runtime.cache.manager import CacheManager, Prefix
from sglite.runtime.cache.radix_tree import Namespace

A = Namespace(tenant="A")


def _ids(tokens: object) -> np.ndarray:
    return np.array(list(tokens), np.int32)  # type: ignore[call-overload]


def _store(cache: CacheManager, tokens: np.ndarray, namespace: Namespace = A, now: float = 0.0) -> None:
    """What a request does from beginning to end."""
    prefix = cache.acquire(namespace, tokens)
    needed = -(-len(tokens) // cache.page_size) - prefix.length // cache.page_size
    pages = cache.allocate(needed, now)
    assert pages is not None
    cache.commit(prefix, tokens[prefix.length :], pages)
    cache.release(prefix)
    assert not cache.problems([])


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("seed", range(5))
def test_it_matches_what_a_dictionary_of_prefixes_matches(page_size: int, seed: int) -> None:
    rng = random.Random(seed)
    cache = CacheManager(20_000, page_size)
    known: set[tuple[int, ...]] = set()
    for _ in range(150):
        tokens = tuple(rng.choice((1, 1, 1, 2)) for _ in range(rng.randint(1, 40)))
        longest = max((k for k in range(0, len(tokens) + 1, page_size) if tokens[:k] in known or k == 0), default=0)
        assert cache.match_length(A, _ids(tokens)) == longest
        _store(cache, _ids(tokens))
        known |= {tokens[:k] for k in range(page_size, len(tokens) + 1, page_size)}
    assert cache.counts.cached == len(known)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("seed", range(5))
def test_pages_stay_with_their_tokens_through_splits_and_evictions(page_size: int, seed: int) -> None:
    rng = random.Random(seed)
    cache = CacheManager(40, page_size)
    content: dict[int, tuple[int, ...]] = {}  # page -> all tokens up to its end
    locked: list[tuple[Prefix, np.ndarray]] = []
    for _ in range(300):
        if locked and (len(locked) > 2 or rng.random() < 0.4):
            prefix, tokens = locked.pop(rng.randrange(len(locked)))
            pages = cache.pages_of(prefix)
            for i, page in enumerate(pages.tolist()):
                assert content[page] == tuple(tokens[: (i + 1) * page_size].tolist())
            cache.release(prefix)
            continue
        tokens = _ids(rng.choice((1, 1, 2)) for _ in range(rng.randint(1, 11 * page_size)))
        prefix = cache.acquire(A, tokens)
        needed = -(-len(tokens) // page_size) - prefix.length // page_size
        pages = cache.allocate(needed, 0.0)
        if pages is None:
            assert cache.available < needed
            cache.release(prefix)
            continue
        first = prefix.length // page_size
        for i, page in enumerate(pages.tolist()):
            content[page] = tuple(tokens[: (first + i + 1) * page_size].tolist())
        cache.commit(prefix, tokens[prefix.length :], pages)
        locked.append((prefix, tokens))
        assert not cache.problems([])
    for prefix, _ in locked:
        cache.release(prefix)
    assert cache.flush()
    assert cache.counts.free == 40


def test_the_least_recently_used_prefix_goes_first_and_from_its_end() -> None:
    cache = CacheManager(30, 1)
    for start in (100, 200, 300):
        _store(cache, _ids(range(start, start + 10)))
    cache.release(cache.acquire(A, _ids(range(100, 110))))  # used again
    assert cache.allocate(4, 0.0) is not None
    assert [cache.match_length(A, _ids(range(s, s + 10))) for s in (100, 200, 300)] == [10, 6, 10]


def test_a_locked_prefix_is_never_evicted() -> None:
    cache = CacheManager(20, 1)
    _store(cache, _ids(range(10)))
    prefix = cache.acquire(A, _ids(range(5)))
    assert cache.allocate(16, 0.0) is None
    assert cache.allocate(15, 0.0) is not None
    assert cache.match_length(A, _ids(range(10))) == 5
    cache.release(prefix)


def test_tenant_and_adapter_of_the_same_name_are_two_namespaces() -> None:  # R103
    cache = CacheManager(100, 1)
    _store(cache, _ids(range(10)), Namespace(tenant="A"))
    assert cache.match_length(Namespace(adapter="A"), _ids(range(10))) == 0
    assert cache.match_length(Namespace(tenant="A"), _ids(range(10))) == 10


def test_leased_prefixes_go_last_and_done_ones_first() -> None:
    cache = CacheManager(30, 1, policy=LeaseThenLRU())
    for start in (100, 200, 300):
        _store(cache, _ids(range(start, start + 10)))
    leased = cache.acquire(A, _ids(range(100, 110)))
    cache.lease(leased, 6, holder="p", end=50.0, since=0.0, now=0.0)
    cache.mark_done(leased, 6)
    cache.release(leased)
    cache.allocate(4, 1.0)  # what follows the leased part goes first
    assert [cache.match_length(A, _ids(range(s, s + 10))) for s in (100, 200, 300)] == [6, 10, 10]
    cache.allocate(15, 1.0)
    assert [cache.match_length(A, _ids(range(s, s + 10))) for s in (100, 200, 300)] == [6, 0, 5]
    cache.allocate(8, 1.0)  # a lease is a preference: memory that is needed is found
    assert [cache.match_length(A, _ids(range(s, s + 10))) for s in (100, 200, 300)] == [3, 0, 0]


def test_a_lease_ends() -> None:
    cache = CacheManager(20, 1)
    _store(cache, _ids(range(100, 110)))
    prefix = cache.acquire(A, _ids(range(100, 110)))
    cache.lease(prefix, 10, holder="p", end=50.0, since=0.0, now=0.0)
    cache.release(prefix)
    _store(cache, _ids(range(200, 210)))
    cache.allocate(5, 60.0)
    assert cache.match_length(A, _ids(range(100, 110))) == 5
    assert cache.match_length(A, _ids(range(200, 210))) == 10


def test_of_leased_prefixes_those_of_the_youngest_program_go_first() -> None:
    cache = CacheManager(30, 1)
    for start, since in ((100, 2.0), (200, 3.0), (300, 1.0)):
        _store(cache, _ids(range(start, start + 10)))
        prefix = cache.acquire(A, _ids(range(start, start + 10)))
        cache.lease(prefix, 10, holder=f"p{start}", end=50.0, since=since, now=0.0)
        cache.release(prefix)
    cache.allocate(13, 5.0)
    assert [cache.match_length(A, _ids(range(s, s + 10))) for s in (100, 200, 300)] == [7, 0, 10]


def test_a_rule_may_ignore_leases() -> None:
    cache = CacheManager(20, 1, policy=LRU())
    _store(cache, _ids(range(100, 110)))
    prefix = cache.acquire(A, _ids(range(100, 110)))
    cache.lease(prefix, 10, holder="p", end=50.0, since=0.0, now=0.0)
    cache.release(prefix)
    _store(cache, _ids(range(200, 210)))
    cache.allocate(5, 1.0)
    assert cache.match_length(A, _ids(range(100, 110))) == 5


def test_what_is_being_computed_can_be_matched() -> None:
    cache = CacheManager(100, 1)
    tokens = _ids(range(20))
    writer = cache.acquire(A, tokens)
    pages = cache.allocate(20, 0.0)
    assert pages is not None
    assert cache.extend(writer, tokens[:8], pages[:8])
    reader = cache.acquire(A, tokens)
    assert reader.length == 8
    assert cache.pages_of(reader).tolist() == pages[:8].tolist()
    assert cache.extend(writer, tokens[8:], pages[8:])
    assert not cache.extend(reader, tokens[8:], pages[8:]), "someone else has that continuation"
    assert not cache.problems([])
    cache.release(writer)
    cache.release(reader)


def test_tainted_kv_is_matched_by_nobody_and_its_pages_come_back() -> None:
    cache = CacheManager(100, 1)
    tokens = _ids(range(20))
    writer = cache.acquire(A, tokens)
    pages = cache.allocate(20, 0.0)
    assert pages is not None
    cache.extend(writer, tokens[:12], pages[:12])
    reader = cache.acquire(A, tokens[:6])
    cache.discard(A, tokens, 8)
    assert writer.tainted
    assert not reader.tainted
    assert cache.match_length(A, tokens) == 8
    assert not cache.problems([pages[12:]])
    cache.commit(writer, tokens[12:], pages[12:])  # nothing hangs on below what is wrong
    cache.release(writer)
    cache.release(reader)
    assert not cache.problems([])
    assert cache.counts.cached == 8


def _locked(cache: CacheManager, *parts: tuple[int, int]) -> Prefix:
    """A locked prefix of runs of one token each: (token, how many)."""
    tokens = _ids(t for token, n in parts for t in [token] * n)
    _store(cache, tokens)
    return cache.acquire(A, tokens)


def test_rows_are_grouped_by_the_prefix_that_saves_the_most_reads() -> None:
    cache = CacheManager(10_000, 1)
    trunk = (1, 300)
    left = [_locked(cache, trunk, (2, 400), (10 + i, 5)) for i in range(3)]
    right = [_locked(cache, trunk, (3, 400), (20 + i, 5)) for i in range(2)]
    lonely = [_locked(cache, (4, 500))]
    groups = cache.shared_groups([*left, *right, *lonely], 100)
    assert sorted(groups) == [(700, [0, 1, 2]), (700, [3, 4])]
    assert cache.shared_groups([*left[:1], *right[:1], *lonely], 100) == [(300, [0, 1])]
    assert cache.shared_groups([*left, *right], 1000) == []
    many = [_locked(cache, trunk, (30 + i, 20)) for i in range(8)]
    assert cache.shared_groups([*many, *left[:2]], 100) == [(300, list(range(10)))]


def test_matching_a_long_prefix_is_fast() -> None:
    import time

    cache = CacheManager(20_000, 1)
    tokens = _ids(range(8192))
    _store(cache, tokens)
    best = min(_timed(time.perf_counter, lambda: cache.match_length(A, tokens)) for _ in range(20))
    assert best < 1e-3


def _timed(clock: object, call: object) -> float:
    began = clock()  # type: ignore[operator]
    call()  # type: ignore[operator]
    return clock() - began  # type: ignore[operator]
