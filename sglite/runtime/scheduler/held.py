"""Rows that stay after their end, so that `continue_from` can append to them without a new admission."""

from __future__ import annotations

from dataclasses import dataclass

from sglite.runtime.batch import IntArray
from sglite.runtime.cache.manager import Prefix
from sglite.runtime.cache.radix_tree import Namespace


@dataclass(slots=True, eq=False)
class HeldRow:
    """`tokens`: prompt and output as the client has them  # int32[k]. `row` and `prefix` are gone (-1, None) once
    a request took them over or memory was needed; then continuing is an admission that finds its prefix cached."""

    request_id: str
    tokens: IntArray
    namespace: Namespace
    row: int
    prefix: Prefix | None
    until: float  # time.monotonic() seconds


class HeldRows:
    """In the order in which they were held. The scheduler gives rows and locks back; this only keeps the record."""

    def __init__(self) -> None:
        self._held: dict[str, HeldRow] = {}

    def __len__(self) -> int:
        return len(self._held)

    @property
    def num_rows(self) -> int:
        """Rows that are reserved."""
        return sum(h.row >= 0 for h in self._held.values())

    def add(self, held: HeldRow) -> None:
        self._held[held.request_id] = held

    def get(self, request_id: str) -> HeldRow | None:
        return self._held.get(request_id)

    def pop(self, request_id: str) -> HeldRow | None:
        return self._held.pop(request_id, None)

    def oldest_locked(self) -> HeldRow | None:
        return next((h for h in self._held.values() if h.row >= 0 or h.prefix is not None), None)

    def expired(self, now: float) -> list[HeldRow]:
        return [h for h in self._held.values() if h.until <= now]
