"""Rows of token bits: int32[words], bit i % 32 of word i // 32 is token i."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from sglite.grammar.matcher import Bitmask


def words(vocab_size: int) -> int:
    return (vocab_size + 31) // 32


def empty(vocab_size: int, rows: int | None = None) -> Bitmask:
    """All zero: int32[words], or int32[rows, words]."""
    width = words(vocab_size)
    return np.zeros(width if rows is None else (rows, width), dtype=np.int32)


def of(token_ids: Iterable[int], vocab_size: int) -> Bitmask:
    """A row in which exactly `token_ids` are set."""
    flags = np.zeros(words(vocab_size) * 32, dtype=np.uint8)
    flags[np.fromiter(token_ids, dtype=np.int64)] = 1
    return np.packbits(flags, bitorder="little").view(np.int32)


def ids(row: Bitmask) -> NDArray[np.int64]:
    """The token ids that are set, ascending."""
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))


def contains(row: Bitmask, token_id: int) -> bool:
    return bool((int(row[token_id >> 5]) >> (token_id & 31)) & 1)


def clear(row: Bitmask, token_ids: Sequence[int] | NDArray[np.int64]) -> None:
    """Unset `token_ids`, which are few, in place."""
    if len(token_ids):
        places = np.asarray(token_ids, dtype=np.int64)
        bits = np.left_shift(np.uint32(1), (places & 31).astype(np.uint32))
        np.bitwise_and.at(row.view(np.uint32), places >> 5, ~bits)


def ends(row: Bitmask) -> list[int]:
    """The first and the last id that is set; neither where none is."""
    set_words = np.flatnonzero(row)
    if not len(set_words):
        return []
    first, last = int(set_words[0]), int(set_words[-1])
    low, high = int(row[first]) & 0xFFFF_FFFF, int(row[last]) & 0xFFFF_FFFF
    return [32 * first + (low & -low).bit_length() - 1, 32 * last + high.bit_length() - 1]
