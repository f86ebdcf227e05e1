"""Rows that stay after their end, so that `continue_from` can append to them without a new admission."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from sglite.runtime.batch import IntArray
from sglite.runtime.cache.manager import CacheManager, Prefix
from sglite.runtime.cache.radix_tree import Namespace
from sglite.runtime.request import Request
from sglite.runtime.scheduler.rows import RowTable


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
    since: float  # when its program began


class HeldRows:
    """In the order in which they were held. `hold_s`: how long one waits to be continued, in seconds."""

    def __init__(self, cache: CacheManager, table: RowTable, *, hold_s: float, clock: Callable[[], float]) -> None:
        self._cache = cache
        self._table = table
        self._hold_s = hold_s
        self._clock = clock
        self._held: dict[str, HeldRow] = {}

    def __len__(self) -> int:
        return len(self._held)

    @property
    def num_rows(self) -> int:
        """Rows that are reserved."""
        return sum(h.row >= 0 for h in self._held.values())

    def get(self, request_id: str) -> HeldRow | None:
        return self._held.get(request_id)

    def hold(self, request: Request, tokens: IntArray) -> None:
        """Keep row and lock of a request that is over; `tokens` are copied."""
        held = HeldRow(
            request_id=request.job.request_id,
            tokens=tokens.copy(),
            namespace=request.namespace,
            row=request.row,
            prefix=request.prefix,
            until=self._clock() + self._hold_s,
            since=request.job.since,
        )
        request.row, request.prefix = -1, None
        self._held[held.request_id] = held

    def hand_over(self, held: HeldRow, request: Request) -> None:
        """`request`, whose tokens begin with the held ones, takes over row and lock; where they are gone already it
        is admitted like any other and finds the prefix cached."""
        request.row, held.row = held.row, -1
        request.prefix, held.prefix = held.prefix, None
        held.until = max(held.until, self._clock() + self._hold_s)

    def release(self, request_id: str) -> None:
        """Forget it. A no-op for unknown ids."""
        held = self._held.pop(request_id, None)
        if held is not None:
            self._give_up(held)

    def release_expired(self, now: float) -> None:
        for request_id in [h.request_id for h in self._held.values() if h.until <= now]:
            self.release(request_id)

    def release_youngest(self, *, after: float = -math.inf) -> bool:
        """The row of the program that began last gets free and its pages evictable; its tokens are still known. False
        where none is held for a program that began `after` that moment."""
        held = [h for h in self._held.values() if (h.row >= 0 or h.prefix is not None) and h.since > after]
        if not held:
            return False
        self._give_up(max(held, key=lambda h: h.since))
        return True

    def _give_up(self, held: HeldRow) -> None:
        if held.prefix is not None:
            self._cache.release(held.prefix)
            held.prefix = None
        if held.row >= 0:
            self._table.give(held.row)
            held.row = -1
