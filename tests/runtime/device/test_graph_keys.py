"""Which graph a small step on a GPU goes through."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("triton")

from sglite.runtime.device.cuda.ahead import keys_ahead, keys_to_compile
from sglite.runtime.device.cuda.inputs import COARSE, MAX_SMALL, zeros
from sglite.runtime.device.cuda.keys import graph_key, larger_sizes, with_chunks
from sglite.runtime.device.cuda.tree_plan import TreeKey


@pytest.mark.parametrize("kv_heads", [2, 8])
def test_every_small_step_without_tree_attention_has_a_graph_that_is_captured_ahead(kv_heads: int) -> None:
    ahead = keys_ahead(kv_heads, max_rows=256)
    assert len(ahead) == len(set(ahead)) < 110
    dice = np.random.default_rng(0)
    for _ in range(2000):
        tokens, longest = int(dice.integers(1, 513)), int(dice.integers(0, 20000))
        wanted = int(dice.integers(1, tokens + 1))
        assert graph_key(tokens, wanted, kv_heads=kv_heads, decode=False, longest=longest) in ahead
        rows = int(dice.integers(1, 257))
        assert graph_key(rows, rows, kv_heads=kv_heads, decode=True, longest=longest) in ahead


def test_prefixes_that_are_read_together_have_a_graph_that_is_captured_ahead() -> None:
    ahead = keys_ahead(8, max_rows=256)
    for tokens in range(2, 513):
        for items in (1, 17, 64):
            for decode in (tokens <= 128, False):
                key = graph_key(tokens, tokens, kv_heads=8, decode=decode, longest=99, tree=TreeKey(items, 64))
                assert key in ahead


def test_what_is_compiled_has_every_number_of_parts() -> None:
    compiled = {(key.decode, key.splits, key.tree and key.tree.block_m) for key in keys_to_compile(8, max_rows=256)}
    for tokens in range(1, 257):
        for longest in (10, 1000, 2000, 9000):
            for tree in (None, TreeKey(32, 64), TreeKey(512, 128)):
                for decode in (True, False):
                    key = graph_key(tokens, tokens, kv_heads=8, decode=decode, longest=longest, tree=tree)
                    if tree is None or tokens > 1:
                        assert (key.decode, key.splits, key.tree and key.tree.block_m) in compiled


def test_steps_that_are_not_decode_steps_of_one_size_share_a_graph() -> None:
    keys = {
        graph_key(tokens, wanted, kv_heads=8, decode=False, longest=longest)
        for tokens in range(COARSE[4] + 1, COARSE[5] + 1)
        for wanted in range(1, tokens + 1)
        for longest in (0, 100, 1500, 30000)
    }
    assert len(keys) == 1


def test_a_larger_graph_is_at_most_half_as_large_again_and_none_serves_one_row() -> None:
    for decode in (True, False):
        for tokens in range(1, MAX_SMALL + 1):
            key = graph_key(tokens, tokens, kv_heads=8, decode=decode, longest=0)
            sizes = larger_sizes(key)
            assert sizes == sorted(sizes) and all(key.tokens < size <= 1.5 * key.tokens for size in sizes)
            for size in sizes:
                other = graph_key(size, tokens, kv_heads=8, decode=decode, longest=0)
                assert other.tokens == size and other.decode == decode
                assert not other.logits or other.logits >= tokens
    assert larger_sizes(graph_key(1, 1, kv_heads=8, decode=True, longest=0)) == []
    assert larger_sizes(graph_key(25, 25, kv_heads=8, decode=True, longest=0)) == [32, 40]


def test_a_graph_has_room_for_its_tokens_and_logits() -> None:
    for tokens in range(1, MAX_SMALL + 1):
        for wanted in {1, min(tokens, 128), min(tokens, 129), tokens}:
            key = graph_key(tokens, wanted, kv_heads=8, decode=False, longest=0)
            assert key.tokens >= tokens and key.logits >= wanted


def test_a_prompts_new_tokens_read_what_is_cached_of_it_together() -> None:
    batch = zeros(rows=2, tokens=30, start=500)
    assert with_chunks(batch).shared_prefixes == ((500, (0,)), (500, (1,)))


def test_few_new_tokens_or_a_short_prefix_are_read_one_by_one() -> None:
    for batch in (zeros(rows=3, tokens=7, start=500), zeros(rows=3, tokens=100, start=100)):
        assert with_chunks(batch) is batch


def test_prompts_that_share_most_of_their_prefix_stay_together_and_others_leave_the_group() -> None:
    batch = zeros(rows=4, tokens=30, start=500)
    batch.starts[2] = 5000
    object.__setattr__(batch, "shared_prefixes", ((450, (0, 1, 2, 3)),))
    assert with_chunks(batch).shared_prefixes == ((450, (0, 1, 3)), (5000, (2,)))
