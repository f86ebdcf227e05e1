"""What holds for a matcher of any kind, engine and vocabulary: the operations against each other."""

from __future__ import annotations

import random

import numpy as np
import pytest

from sglite.grammar import bitmask
from sglite.grammar.compiler import GrammarCompiler
from sglite.grammar.matcher import Matcher
from tests.grammar.helpers import SPECS, legal, random_walk, row_of

KINDS = sorted(SPECS)
SEEDS = range(6)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def start(compiler: GrammarCompiler, kind: str) -> Matcher:
    return compiler.compile_now(SPECS[kind]).matcher()


@pytest.mark.parametrize("seed", SEEDS)
def test_accept_takes_what_the_mask_allows_and_refuses_the_rest(compiler, kind, seed):
    rng = random.Random(seed)
    size = compiler.vocab.size
    matcher = start(compiler, kind)
    for _ in range(12):
        allowed = set(legal(matcher, size))
        forced = matcher.forced()
        for token_id in rng.sample(range(size), 60) + rng.sample(sorted(allowed), min(10, len(allowed))):
            taken = matcher.accept([token_id])
            if taken:
                matcher.rollback(1)
            if not forced:
                assert taken == (token_id in allowed), (token_id, compiler.vocab.tokens[token_id])
            elif token_id in allowed:
                assert taken == 1
        token_id = rng.choice(sorted(allowed))
        assert matcher.accept([token_id]) == 1
        if matcher.finished:
            break


@pytest.mark.parametrize("seed", SEEDS)
def test_rollback_undoes_accept(compiler, kind, seed):
    rng = random.Random(seed)
    size = compiler.vocab.size
    matcher = start(compiler, kind)
    rows, tokens = [row_of(matcher, size)], []
    for _ in range(10):
        token_id = rng.choice(bitmask.ids(rows[-1]))
        matcher.accept([token_id])
        tokens.append(token_id)
        rows.append(row_of(matcher, size))
    back = rng.randint(1, len(tokens))
    matcher.rollback(back)
    assert np.array_equal(row_of(matcher, size), rows[-1 - back])
    assert matcher.accept(tokens[len(tokens) - back :]) == back
    assert np.array_equal(row_of(matcher, size), rows[-1])
    matcher.rollback(len(tokens))
    assert np.array_equal(row_of(matcher, size), rows[0])


@pytest.mark.parametrize("seed", SEEDS)
def test_a_fork_goes_its_own_way(compiler, kind, seed):
    rng = random.Random(seed)
    size = compiler.vocab.size
    matcher = start(compiler, kind)
    walked = random_walk(matcher, size, steps=4, rng=rng)
    before = row_of(matcher, size)
    twin = matcher.fork()
    assert np.array_equal(row_of(twin, size), before)
    random_walk(twin, size, steps=5, rng=rng)
    assert np.array_equal(row_of(matcher, size), before)
    twin.rollback(len(walked) - 1 if walked else 0)
    assert np.array_equal(row_of(matcher, size), before)


@pytest.mark.parametrize("seed", SEEDS)
def test_forced_text_is_what_the_masks_give_one_by_one(compiler, kind, seed):
    rng = random.Random(seed)
    size = compiler.vocab.size
    matcher = start(compiler, kind)
    for _ in range(12):
        forced = matcher.forced()
        before = row_of(matcher, size)
        stepwise = matcher.fork()
        for token_id in forced:
            assert legal(stepwise, size) == [token_id]
            assert stepwise.accept([token_id]) == 1
        assert stepwise.forced() == [] or len(forced) >= 64
        assert np.array_equal(row_of(matcher, size), before), "forced() moved the matcher"
        if matcher.finished:
            break
        matcher.accept([rng.choice(legal(matcher, size))])


@pytest.mark.parametrize("seed", SEEDS)
def test_stop_ids_are_legal_exactly_where_the_text_is_complete(compiler, kind, seed):
    rng = random.Random(seed)
    size = compiler.vocab.size
    stop_ids = set(compiler.vocab.stop_ids)
    matcher = start(compiler, kind)
    for _ in range(15):
        allowed = set(legal(matcher, size))
        assert stop_ids & allowed == (stop_ids if matcher.can_stop else set())
        assert matcher.finished == (allowed == stop_ids)
        if matcher.finished:
            break
        matcher.accept([rng.choice(sorted(allowed - stop_ids))])


def test_after_a_stop_id_nothing_but_stop_ids_is_legal(compiler, kind):
    size = compiler.vocab.size
    rng = random.Random(0)
    matcher = start(compiler, kind)
    while not matcher.can_stop:
        matcher.accept([rng.choice([i for i in legal(matcher, size) if i not in compiler.vocab.stop_ids])])
    before = row_of(matcher, size)
    stop_id = compiler.vocab.stop_ids[1]
    assert matcher.accept([stop_id]) == 1
    assert matcher.finished
    assert legal(matcher, size) == sorted(compiler.vocab.stop_ids)
    assert matcher.forced() == []
    assert matcher.accept([97]) == 0
    matcher.rollback(1)
    assert np.array_equal(row_of(matcher, size), before)


def test_special_and_padded_ids_are_never_text(compiler, kind):
    vocab = compiler.vocab
    never = [i for i, text in enumerate(vocab.tokens) if not text and i not in vocab.stop_ids]
    rng = random.Random(1)
    matcher = start(compiler, kind)
    for _ in range(10):
        allowed = legal(matcher, vocab.size)
        assert not set(never) & set(allowed)
        assert all(matcher.accept([i]) == 0 for i in never[:3])
        if matcher.finished:
            break
        matcher.accept([rng.choice(allowed)])


def test_a_wrong_token_leaves_the_matcher_usable(compiler, kind):
    size = compiler.vocab.size
    matcher = start(compiler, kind)
    allowed = legal(matcher, size)
    wrong = next(i for i in range(size) if i not in allowed)
    assert matcher.accept([wrong, *allowed]) == 0
    for token_id in (size, size + 10**6, -1, 10**9):
        assert matcher.accept([token_id]) == 0
    assert matcher.accept([allowed[0], -1]) == 1
    matcher.rollback(1)
    assert legal(matcher, size) == allowed
