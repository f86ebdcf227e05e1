"""Which shared prefixes a step reads once, and how that work is cut into programs. Numbers only.

A group of rows with a prefix in common is cut twice: its rows into tiles of queries, its prefix into parts of `chunk`
tokens. A tile and a part are an item, and a KV head of an item is a program of the prefix kernel:

    tokens of the prefix   0 ....... chunk ....... 2 chunk ... length
    rows 0 .. per_tile     | item 0  | item 1      | item 2    |
    rows per_tile ..       | item 3  | item 4      | item 5    |

All numbers of a plan hold as long as the same rows share the same prefixes: a decode step needs no new one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sglite.runtime.batch import IntArray

ITEM_WORDS = 8  # first member, members, row of the page table, begin, end; the rest is not used
SHARE_WORDS = 4  # tokens of the shared prefix, its first item, items, place among the item's members
BLOCK_T = 64  # tokens of a tile of keys
MOST_ITEMS = 512
_SMALLEST_CHUNK = 128  # tokens; a part below that costs more to merge than it gains
_MOST_PARTS = 32  # of one prefix
_MOST_WAVES = 4
_START_TOKENS = 192  # that many tokens more in a program are better than one program more
_PLACES = np.arange(128, dtype=np.int32)
_ITEM_BUCKETS = (16, 32, 48, 64, 96, 128, 192, 256, 384, MOST_ITEMS)


@dataclass(frozen=True, slots=True)
class TreeKey:
    """What tells graphs with shared prefixes apart."""

    items: int  # programs a KV head, padded
    block_m: int  # queries of an item


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Rows (of the attention kernels: new tokens) that begin with the same `length` tokens."""

    length: int
    members: IntArray

    @property
    def saved(self) -> int:
        """Tokens that need not be read."""
        return self.length * (len(self.members) - 1)


@dataclass(frozen=True, slots=True)
class TreePlan:
    key: TreeKey
    members: IntArray  # the rows of each tile side by side
    items: IntArray  # [I, ITEM_WORDS]
    shares: IntArray  # [N, SHARE_WORDS]

    @property
    def prefixes(self) -> IntArray:
        """Tokens that each row need not read itself  # int32[N]"""
        return self.shares[:, 0]


@dataclass(frozen=True, slots=True)
class TreeShape:
    """What the plan depends on beside the groups."""

    kv_heads: int
    queries: int  # query heads a KV head
    kv_bytes: int  # of a token in one layer
    processors: int  # multiprocessors of the GPU


@dataclass(frozen=True, slots=True)
class Costs:
    """Microseconds of one layer on an H200, fitted to the grid in benchmarks/tree_attention.md, without what both ways
    have in common. Several rows read the same from L2 at a rate that grows while their programs fill the GPU."""

    launches: float = 1.0  # two kernels more
    row: float = 0.07  # merging a row
    fresh_bytes: float = 3.6e6  # bytes a microsecond from memory
    cached_bytes: float = 4.4e6  # of few rows that read the same
    most_cached_bytes: float = 9.7e6
    filling_rows: float = 38.0  # from which the rate grows with their number
    tile_token: float = 0.0193  # a KV token of a program of 128 queries
    small_tile_token: float = 0.0165  # of 64
    start_tokens: float = 64.0  # a program's start and end, in tokens of its loop
    margin: float = 1.1  # what is not clearly faster is not done

    def plain(self, groups: Sequence[Group], rows: int, shape: TreeShape) -> float:
        """What the groups' rows, among so many `rows`, take to read their prefixes one by one."""
        fresh = sum(group.length for group in groups) * shape.kv_bytes
        read = sum(group.length * len(group.members) for group in groups) * shape.kv_bytes
        rate = min(self.most_cached_bytes, self.cached_bytes * max(1.0, rows / self.filling_rows))
        return max(fresh / self.fresh_bytes, read / rate)

    def shared(self, groups: Sequence[Group], rows: int, cut: Cut, shape: TreeShape) -> float:
        """What all groups take together, each prefix read once."""
        size = sum(group.length for group in groups) * shape.kv_bytes
        token = self.tile_token if cut.block_m > 64 else self.small_tile_token
        waves = -(-cut.items * shape.kv_heads // shape.processors)
        products = waves * (cut.chunk + self.start_tokens) * token
        return self.launches + self.row * rows + max(size / self.fresh_bytes, products)

    def could_pay(self, groups: Sequence[Group], rows: int, shape: TreeShape) -> bool:
        """Whether there is a point in cutting."""
        return self.margin * (self.launches + self.row * rows) < self.plain(groups, rows, shape)

    def prefer_shared(self, groups: Sequence[Group], rows: int, cut: Cut, shape: TreeShape) -> bool:
        return self.margin * self.shared(groups, rows, cut, shape) < self.plain(groups, rows, shape)


@dataclass(frozen=True, slots=True)
class Cut:
    """How groups are cut into items."""

    block_m: int
    per_tile: int  # rows
    chunk: int  # tokens of a part
    items: int


MEASURED = Costs()


def plan_tree(groups: Sequence[Group], rows: IntArray, shape: TreeShape, *, costs: Costs = MEASURED) -> TreePlan | None:
    """`rows`: the row of the page table of each of the N rows. None: reading prefixes row by row is faster. Where that
    is so for all groups together, those that save the most are looked at alone."""
    groups = [group for group in groups if len(group.members) > 1 and group.length > _SMALLEST_CHUNK]
    while groups:
        cut = cut_groups(groups, shape) if costs.could_pay(groups, len(rows), shape) else None
        if cut is not None and costs.prefer_shared(groups, len(rows), cut, shape):
            return make_plan(groups, rows, cut)
        groups = sorted(groups, key=lambda group: group.saved)[(len(groups) + 1) // 2 :]
    return None


def cut_groups(groups: Sequence[Group], shape: TreeShape) -> Cut | None:
    """The cut with the shortest longest program. None: there are more items than there may be."""
    largest = max(len(group.members) for group in groups)
    block_m = 128 if largest * shape.queries > 64 else 64
    per_tile = block_m // shape.queries
    tiles = [-(-len(group.members) // per_tile) for group in groups]
    lengths = [group.length for group in groups]
    best: tuple[int, Cut] | None = None
    for waves in range(1, _MOST_WAVES + 1):
        chunk, items = _fit(tiles, lengths, max(1, waves * (shape.processors // shape.kv_heads)))
        if items > MOST_ITEMS:
            return None
        cost = -(-items * shape.kv_heads // shape.processors) * (chunk + _START_TOKENS)
        if best is None or cost < best[0]:
            best = cost, Cut(block_m, per_tile, chunk, items)
    assert best is not None
    return best[1]


def _fit(tiles: list[int], lengths: list[int], target: int) -> tuple[int, int]:
    """The smallest chunk that makes at most `target` items (or the fewest there can be), and how many it makes."""
    longest = max(lengths)

    def items(chunk: int) -> int:
        return sum(n * -(-length // chunk) for n, length in zip(tiles, lengths, strict=True))

    smallest = max(_SMALLEST_CHUNK, -(-longest // _MOST_PARTS))
    low, high = -(-smallest // BLOCK_T), max(-(-smallest // BLOCK_T), -(-longest // BLOCK_T))
    while low < high:
        middle = (low + high) // 2
        if items(middle * BLOCK_T) <= target:
            high = middle
        else:
            low = middle + 1
    return low * BLOCK_T, items(low * BLOCK_T)


def make_plan(groups: Sequence[Group], rows: IntArray, cut: Cut) -> TreePlan:
    shares = np.zeros((len(rows), SHARE_WORDS), np.int32)
    items: list[tuple[int, ...]] = []
    first_member = 0
    for group in groups:
        begins = range(0, group.length, cut.chunk)
        for first in range(0, len(group.members), cut.per_tile):
            tile = group.members[first : first + cut.per_tile]
            shares[tile, :3] = group.length, len(items), len(begins)
            shares[tile, 3] = _PLACES[: len(tile)]
            head = first_member, len(tile), int(rows[tile[0]])
            items += [(*head, begin, min(begin + cut.chunk, group.length), 0, 0, 0) for begin in begins]
            first_member += len(tile)
    key = TreeKey(next(size for size in _ITEM_BUCKETS if size >= len(items)), cut.block_m)
    members = np.concatenate([group.members for group in groups]).astype(np.int32)
    return TreePlan(key, members, np.array(items, np.int32), shares)
