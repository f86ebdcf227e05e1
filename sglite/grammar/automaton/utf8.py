"""Ranges of characters as sequences of byte ranges (the way of `utf8-ranges`: split at the ends of encodings)."""

from __future__ import annotations

from collections.abc import Iterator

_ENDS = (0x7F, 0x7FF, 0xFFFF, 0x10FFFF)  # the last character of each length of encoding
_SURROGATES = (0xD800, 0xDFFF)


def byte_sequences(low: int, high: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Disjoint sequences of byte ranges that together are the UTF-8 of the characters low .. high, surrogates left
    out."""
    if low > high:
        return
    first, last = _SURROGATES
    if low <= last and high >= first:
        yield from byte_sequences(low, first - 1)
        yield from byte_sequences(last + 1, high)
        return
    for end in _ENDS:
        if low <= end < high:
            yield from byte_sequences(low, end)
            yield from byte_sequences(end + 1, high)
            return
    if high <= _ENDS[0]:
        yield ((low, high),)
        return
    for tail in range(1, 4):  # the last `tail` bytes should run over their whole range, or not at all
        mask = (1 << (6 * tail)) - 1
        if low & ~mask == high & ~mask:
            continue
        if low & mask:
            yield from byte_sequences(low, low | mask)
            yield from byte_sequences((low | mask) + 1, high)
            return
        if high & mask != mask:
            yield from byte_sequences(low, (high & ~mask) - 1)
            yield from byte_sequences(high & ~mask, high)
            return
    yield tuple(zip(chr(low).encode(), chr(high).encode(), strict=True))
