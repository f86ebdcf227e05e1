"""Graphs that are captured before somebody waits for them, those first that most will need."""

from __future__ import annotations

from collections.abc import Iterator

from sglite.runtime.device.cuda.inputs import COARSE, SIZES, GraphKey, padded
from sglite.runtime.device.cuda.keys import graph_key
from sglite.runtime.device.cuda.tree_plan import TreeKey

_MANY = 512  # new tokens of the largest
_FEW = 32  # rows that decode, or new tokens, of steps that nearly everybody needs
_SHORT, _LONG = 256, 4096  # cached tokens of the longest row
_TREES = tuple(TreeKey(1, block_m) for block_m in (64, 128))  # padded like any other


def keys_ahead(kv_heads: int, max_rows: int) -> list[GraphKey]:
    """The graphs of all steps but those of more than _MANY tokens, and with tree attention of more than 128 rows or of
    so many items that it is rare."""
    return list(dict.fromkeys(_in_order(kv_heads, max_rows)))


def keys_to_compile(kv_heads: int, max_rows: int) -> list[GraphKey]:
    """Graphs that together have all kernels of small steps."""
    trees = [
        graph_key(n, n, kv_heads=kv_heads, decode=True, longest=longest, tree=tree)
        for n in _rows(max_rows)
        for longest in (_SHORT, _LONG)
        for tree in _TREES
    ]
    largest = graph_key(COARSE[-1], 1, kv_heads=kv_heads, decode=False, longest=0)
    return list(dict.fromkeys([*keys_ahead(kv_heads, max_rows), *trees, largest]))


def _rows(max_rows: int) -> list[int]:
    """Padded numbers of rows that decode."""
    largest = padded(min(max_rows, SIZES[-1]), coarse=False)
    return [size for size in SIZES if size <= largest]


def _in_order(kv_heads: int, max_rows: int) -> Iterator[GraphKey]:
    rows = _rows(max_rows)

    def decode(sizes: list[int], longest: int) -> Iterator[GraphKey]:
        return (graph_key(n, n, kv_heads=kv_heads, decode=True, longest=longest) for n in sizes)

    def several(sizes: list[int], *trees: TreeKey | None) -> Iterator[GraphKey]:
        """All with logits of few tokens, then with those of all."""
        for wanted in (1, COARSE[-1]):
            for n in sizes:
                for tree in trees:
                    yield graph_key(n, min(n, wanted), kv_heads=kv_heads, decode=False, longest=0, tree=tree)

    few = [n for n in rows if n <= _FEW]
    yield from decode(few[:1], _SHORT)
    yield from several([n for n in COARSE if n <= 4 * _FEW], None)
    yield from decode(few, _SHORT)
    yield from decode(few, _LONG)
    yield from several([n for n in COARSE if 2 <= n <= _MANY], *_TREES)
    yield from several([n for n in COARSE if n <= _MANY], None)
    for longest in (_SHORT, _LONG):
        yield from decode(rows[len(few) :], longest)
