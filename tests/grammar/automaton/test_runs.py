"""A run that a matcher takes at once leaves it where its tokens, one by one, leave another."""

from __future__ import annotations

import random

import pytest

from sglite.grammar import bitmask
from sglite.grammar.compiler import GrammarCompiler
from tests.grammar.automaton import test_followed
from tests.grammar.automaton.test_followed import SCHEMAS, both, mask, odd_first

compiler = test_followed.compiler


@pytest.mark.parametrize("name", ["tagged", "nested", "patterns", "numbers"])
def test_a_run_is_the_forced_text(compiler: GrammarCompiler, name: str) -> None:
    vocab, rng, taken = compiler.vocab, random.Random(5), 0
    for _ in range(12):
        followed, exact = both(compiler, SCHEMAS[name])
        so_far: list[int] = []
        while not exact.finished and len(so_far) < 60:
            forced = exact.forced()
            assert followed.forced() == forced
            run = followed.known_run()
            if run is not None:
                assert list(run.tokens) == forced
                followed.take_run(run)
                assert exact.accept(forced) == len(forced)
                so_far += forced
                taken += 1
                assert (mask(followed, vocab.size) == mask(exact, vocab.size)).all()
                if rng.random() < 0.3:  # back into the run
                    back = rng.randint(1, len(forced))
                    followed.rollback(back)
                    exact.rollback(back)
                    del so_far[-back:]
                    assert (mask(followed, vocab.size) == mask(exact, vocab.size)).all()
                continue
            token_id = odd_first(rng, bitmask.ids(mask(exact, vocab.size)).tolist(), vocab)
            assert followed.accept((token_id,)) == exact.accept((token_id,)) == 1
            so_far.append(token_id)
    assert taken > 3
