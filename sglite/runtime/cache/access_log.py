"""The last accesses of the prefix cache, kept to say how far it is from the best one in hindsight."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from sglite.runtime.batch import IntArray
from sglite.runtime.cache.optimum import Access, optimal_hits


@dataclass(slots=True, eq=False)
class Entry:
    """One admission. `tokens`: the prompt, at its end prompt and output as far as they were computed."""

    tokens: IntArray
    num_asked: int  # prompt tokens
    num_read: int  # of those, the ones that may come from a cache
    num_found: int


class AccessLog:
    """In the order of admission. `capacity`: of the cache, in tokens."""

    def __init__(self, size: int, capacity: int) -> None:
        self._entries: deque[Entry] = deque(maxlen=size)
        self._capacity = capacity

    def add(self, tokens: IntArray, *, num_read: int, num_found: int) -> Entry:
        entry = Entry(tokens.copy(), len(tokens), num_read, min(num_found, num_read))
        self._entries.append(entry)
        return entry

    def rates(self) -> tuple[float, float]:
        """(share of prompt tokens found in the cache, share that the best eviction would have found)."""
        entries = list(self._entries)
        asked = sum(entry.num_asked for entry in entries)
        if not asked:
            return 0.0, 0.0
        best = optimal_hits([Access(entry.tokens, entry.num_read) for entry in entries], self._capacity)
        return sum(entry.num_found for entry in entries) / asked, best / asked
