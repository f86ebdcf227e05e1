from __future__ import annotations

import random

import numpy as np
import pytest

from sglite.grammar import bitmask, spec
from sglite.grammar.closing import JsonState, closing_tokens
from sglite.grammar.heal import heal_prefix, heal_token
from sglite.grammar.vocab import Vocab
from tests.fakes.bpe import bpe_tokenizer
from tests.grammar.helpers import SPECS, legal


@pytest.fixture(scope="module")
def vocab() -> Vocab:
    return Vocab.of(bpe_tokenizer())


def token(vocab: Vocab, text: str) -> int:
    return vocab.with_bytes(text.encode())[0]


def brute_force(vocab: Vocab, owed: bytes) -> set[int]:
    return {i for i, t in enumerate(vocab.tokens) if t and (t.startswith(owed) or owed.startswith(t))}


def test_the_next_token_continues_the_cut_one(vocab):
    for text in ("am", "J", '":', "a"):
        matcher = heal_token(token(vocab, text), None, vocab)
        assert matcher is not None
        assert set(legal(matcher, vocab.size)) == brute_force(vocab, text.encode())
        assert not matcher.can_stop


def test_a_piece_of_the_prefix_leaves_the_rest_owed(vocab):
    matcher = heal_token(token(vocab, "am"), None, vocab)
    assert matcher is not None
    before = legal(matcher, vocab.size)
    assert matcher.accept([token(vocab, "a")]) == 1
    assert set(legal(matcher, vocab.size)) == brute_force(vocab, b"m")
    assert matcher.accept([token(vocab, "a")]) == 0
    matcher.rollback(1)
    assert legal(matcher, vocab.size) == before


def test_text_is_free_after_the_prefix(vocab):
    matcher = heal_token(token(vocab, "am"), None, vocab)
    assert matcher is not None
    assert matcher.accept([token(vocab, "ame")]) == 1
    row = bitmask.empty(vocab.size)
    matcher.fill(row)
    assert (row == -1).all()
    assert matcher.can_stop
    assert not matcher.finished
    assert matcher.forced() == []
    assert matcher.accept([5, vocab.stop_ids[0]]) == 2
    matcher.rollback(3)
    assert set(legal(matcher, vocab.size)) == brute_force(vocab, b"am")


def test_nothing_to_heal_where_no_longer_token_begins_so_or_the_token_is_special(vocab):
    longest = max(range(vocab.size), key=lambda i: len(vocab.tokens[i]))
    assert heal_token(longest, None, vocab) is None
    assert heal_token(vocab.stop_ids[0], None, vocab) is None
    assert heal_token(vocab.size + 7, None, vocab) is None
    assert heal_prefix([], vocab) is None
    assert heal_prefix([3, token(vocab, "am")], vocab) == ([3], b"am")


@pytest.mark.parametrize("kind", sorted(SPECS))
@pytest.mark.parametrize("cut", ["a", " ", '"', "am"])
def test_what_goes_beyond_the_prefix_obeys_the_grammar(bpe_compiler, kind, cut):
    """Against the definition: a token is legal where its rest is a legal beginning, byte by byte."""
    vocab = bpe_compiler.vocab
    grammar = bpe_compiler.compile_now(SPECS[kind])
    matcher = bpe_compiler.heal(token(vocab, cut), grammar.matcher())
    assert matcher is not None
    owed = cut.encode()
    expected = set()
    for token_id in brute_force(vocab, owed):
        rest = vocab.tokens[token_id][len(owed) :]
        spelled = [vocab.with_bytes(bytes([b]))[0] for b in rest]
        if grammar.matcher().accept(spelled) == len(spelled):
            expected.add(token_id)
    assert set(legal(matcher, vocab.size)) == expected


@pytest.mark.parametrize("seed", range(4))
def test_operations_agree_with_each_other(bpe_compiler, seed):
    rng = random.Random(seed)
    vocab = bpe_compiler.vocab
    grammar = bpe_compiler.compile_now(spec.regex(r"(e)?: ?[A-Z][a-z]{0,20}"))
    matcher = bpe_compiler.heal(token(vocab, "am"), grammar.matcher())
    assert matcher is not None
    rows, tokens = [], []
    for _ in range(6):
        row = bitmask.empty(vocab.size)
        matcher.fill(row)
        rows.append(row)
        twin = matcher.fork()
        tokens.append(rng.choice(bitmask.ids(row).tolist()))
        assert twin.accept(tokens[-1:]) == matcher.accept(tokens[-1:]) == 1
        if matcher.finished:
            break
    matcher.rollback(len(tokens))
    for row, token_id in zip(rows, tokens, strict=True):
        again = bitmask.empty(vocab.size)
        matcher.fill(again)
        assert np.array_equal(again, row)
        matcher.accept([token_id])


def test_the_batch_filler_gives_the_same_rows(bpe_compiler):
    vocab = bpe_compiler.vocab
    grammar = bpe_compiler.compile_now(spec.regex("[a-z]+"))
    healing, healed = (bpe_compiler.heal(token(vocab, "am"), grammar.matcher()) for _ in range(2))
    healed.accept([token(vocab, "ame")])
    free = bpe_compiler.heal(token(vocab, "am"), None)
    free.accept([token(vocab, "ame")])
    rows = bitmask.empty(vocab.size, rows=4)
    assert bpe_compiler.filler.fill([healing, healed, free], [3, 0, 2], rows) == {}
    for matcher, row in ((healing, 3), (healed, 0), (free, 2)):
        alone = bitmask.empty(vocab.size)
        matcher.fill(alone)
        assert np.array_equal(rows[row], alone)
    assert not rows[1].any()


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("extra", [0, 1, 4])
def test_what_closes_in_time_does_so_behind_a_healed_token(bpe_compiler, seed, extra):
    """The token that spells the prefix again is the one that was dropped; none is spent beyond the budget."""
    rng, vocab = random.Random(seed), bpe_compiler.vocab
    grammar = bpe_compiler.compile_now(SPECS["json_schema"])
    least = len(closing_tokens(grammar.matcher(), vocab, JsonState()))
    budget = least + extra
    matcher = heal_token(token(vocab, rng.choice(["am", "J", "a"])), grammar.matcher(budget=budget), vocab)
    tokens: list[int] = []
    while not matcher.finished and len(tokens) < budget + 1:
        forced = matcher.forced() if seed % 2 else []
        tokens += forced or [rng.choice([i for i in legal(matcher, vocab.size) if i not in vocab.stop_ids])]
        assert matcher.accept(forced or tokens[-1:]) == len(forced or tokens[-1:])
    assert len(tokens) <= budget + 1
    assert matcher.can_stop


def test_what_follows_a_common_prefix_is_worked_out_once_a_vocabulary(bpe_compiler, monkeypatch):
    vocab = bpe_compiler.vocab
    grammar = bpe_compiler.compile(spec.regex(" ?[a-z]+")).result()
    rows = []
    for _ in range(3):
        matcher = heal_token(token(vocab, " "), grammar.matcher(), vocab)
        assert matcher is not None
        rows.append(legal(matcher, vocab.size))
        monkeypatch.setattr(Vocab, "extending", None)  # asked for no second time
    assert rows[0] == rows[1] == rows[2] != []


def test_past_the_prefix_the_inner_matcher_rules_alone(bpe_compiler, vocab):
    grammar = bpe_compiler.compile(spec.regex("[a-z]+")).result()
    inner = grammar.matcher()
    matcher = heal_token(token(bpe_compiler.vocab, " "), inner, bpe_compiler.vocab)
    assert matcher is not None
    assert matcher.unwrapped is None
    assert matcher.accept([token(bpe_compiler.vocab, " ")]) == 1
    assert matcher.unwrapped is inner
