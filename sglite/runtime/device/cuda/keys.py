"""Which captured graph a small step goes through: few enough that all of them are there before they are needed.

    decode steps       a graph for each padded number of rows, two where long rows are cut into more parts
    all other steps    coarser sizes, and of each one number of parts

With tree attention up to 128 rows that decode are such other steps too, and the number of its items is padded. What all
that costs is little: 64 tokens take no longer than 48 do, nor 128 than 96 (H200, 0.6B and 8B), and idle programs return
at once.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from sglite.runtime.batch import Batch
from sglite.runtime.device.cuda.attention import choose_splits
from sglite.runtime.device.cuda.inputs import COARSE, SIZES, GraphKey, padded
from sglite.runtime.device.cuda.tree_plan import TreeKey

_FEW_LOGITS = 128  # up to that many rows more or less cost the output projection nothing, but another graph
_SHORT, _LONG = 1024, 4096  # cached tokens of a row: those of a graph for short ones, and of one for longer ones
_FEW_PROGRAMS = 64  # with fewer, parts of short rows are small tiles of which a part has at least two
_SHORT_PARTS = 16
_FEW_ROWS = 128
_FEW_ITEMS = 64  # of tree attention: four waves of programs
_PADDED = 1.5
_CHUNK = 8  # new tokens from which a row is a prompt's, not one with forced text
_SHARED = 128  # cached tokens of such a row from which they are read as a shared prefix,
_TIMES = 4  # if they are that many times its new tokens: those read each other one by one then


def graph_key(
    tokens: int, wanted: int, *, kv_heads: int, decode: bool, longest: int, tree: TreeKey | None = None
) -> GraphKey:
    """`wanted`: tokens with logits. `decode`: see GraphKey, each with logits. `longest`: cached tokens that a row reads
    by itself."""
    if tree is not None:
        decode = decode and tokens > _FEW_ROWS
        tree = TreeKey(max(tree.items, _FEW_ITEMS), tree.block_m)
    size = padded(tokens, coarse=not decode)
    if decode:
        return GraphKey(size, 0, True, parts(size, kv_heads, long=longest > _SHORT), tree)
    logits = size if wanted > _FEW_LOGITS else min(size, _FEW_LOGITS)
    return GraphKey(size, logits, False, parts(size, kv_heads, long=True), tree)


def larger_sizes(key: GraphKey) -> list[int]:
    """Padded sizes whose graphs would do as well, the nearest first. One row has kernels of its own."""
    sizes = SIZES if key.decode else COARSE
    return [size for size in sizes if 1 < key.tokens < size <= _PADDED * key.tokens]


def invariant_key(tokens: int, wanted: int, *, decode: bool) -> GraphKey:
    """The same where no number of parts or prefix may change a sum (invariant.py)."""
    size = padded(tokens, coarse=not decode)
    if decode:
        return GraphKey(size, 0, False, 1)
    return GraphKey(size, size if wanted > _FEW_LOGITS else min(size, _FEW_LOGITS), False, 1)


def parts(tokens: int, kv_heads: int, *, long: bool) -> int:
    """Into how many parts the KV of each row is cut."""
    if long:
        return choose_splits(tokens, kv_heads, _LONG)
    splits = choose_splits(tokens, kv_heads, _SHORT)
    return min(splits, _SHORT_PARTS) if tokens * kv_heads < _FEW_PROGRAMS else splits


def with_chunks(batch: Batch) -> Batch:
    """With prompts as groups that share a prefix: the new tokens of one have all in common that is cached of it. A row
    that shares most of that with others stays among them."""
    long = batch.starts >= np.maximum(_SHARED, _TIMES * batch.num_new)
    chunks = np.flatnonzero((batch.num_new >= _CHUNK) & long)
    if not len(chunks):
        return batch
    alone = dict(zip(chunks.tolist(), batch.starts[chunks].tolist(), strict=True))
    groups: list[tuple[int, tuple[int, ...]]] = []
    for length, rows in batch.shared_prefixes:
        stay = tuple(row for row in rows if alone.get(row, 0) < 2 * length)
        if len(stay) > 1:
            groups.append((length, stay))
            for row in stay:
                alone.pop(row, None)
    groups += [(start, (row,)) for row, start in alone.items()]
    return replace(batch, shared_prefixes=tuple(groups))
