"""The running requests, and which pages hold their tokens."""

from __future__ import annotations

import numpy as np

from sglite.runtime.batch import IntArray, PageUpdates
from sglite.runtime.cache.manager import CacheManager
from sglite.runtime.request import Request
from sglite.runtime.scheduler.rows import RowTable, RowView

NO_UPDATES = PageUpdates(*(np.empty(0, np.int32) for _ in range(3)))


class Running:
    """In the order of admission: the youngest is last. `version` grows when a row comes, goes or grows its prefix."""

    def __init__(self, cache: CacheManager, table: RowTable) -> None:
        self.requests: list[Request] = []
        self.version = 0
        self._cache = cache
        self._table = table
        self._rows = np.empty(0, np.int32)
        self._rows_version = 0

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def rows(self) -> IntArray:
        """The row of each request  # int32[N], not to be written"""
        if self._rows_version != self.version:
            self._rows = np.array([r.row for r in self.requests], np.int32)
            self._rows_version = self.version
        return self._rows

    def view(self) -> RowView:
        return RowView(self._table, self.rows)

    def add(self, request: Request) -> None:
        self.requests.append(request)
        self.version += 1

    def remove(self, request: Request, *, keep: bool) -> None:
        """Its owned pages go back; `keep`: those that hold computed tokens go to the cache."""
        self.requests.remove(request)
        self.version += 1
        self._table.leave(request)
        prefix = request.prefix
        assert prefix is not None
        owned = self._table.owned_pages(request).copy()
        tokens = request.ids[prefix.length : self._table.known_computed(request)] if keep else request.ids[:0]
        self._cache.commit(prefix, tokens, owned)

    def find_pages(self, view: RowView, new: IntArray, now: float) -> PageUpdates | None:
        """Pages for the new tokens of all rows; None (and nothing changed) when there are not enough."""
        missing = self._table.missing_pages(view, new)
        total = int(np.add.reduce(missing))
        if total == 0:
            return NO_UPDATES
        pages = self._cache.allocate(total, now)
        if pages is None:
            return None
        return self._table.give_pages(view, missing, pages)

    def pages_of(self, requests: list[Request]) -> list[PageUpdates]:
        """All pages of rows that have just been loaded."""
        updates: list[PageUpdates] = []
        for request in requests:
            n = int(self._table.num_pages[request.row])
            columns = np.arange(n, dtype=np.int32)
            pages = self._table.pages[request.row, :n].copy()
            updates.append(PageUpdates(np.full(n, request.row, np.int32), columns, pages))
        return updates

    def show_prompt(self, request: Request, new: int) -> None:
        """What a row computes of its prompt in this step can be matched from now on."""
        prefix = request.prefix
        assert prefix is not None
        page = self._table.page_size
        end = min(int(self._table.computed[request.row]) + new, request.num_prompt)
        end -= end % page
        if end > prefix.length:
            first, last = prefix.length // page, end // page
            pages = self._table.pages[request.row, first:last].copy()
            if self._cache.extend(prefix, request.ids[prefix.length : end], pages):
                self.version += 1


def joined(updates: list[PageUpdates]) -> PageUpdates:
    return PageUpdates(
        np.concatenate([u.rows for u in updates]),
        np.concatenate([u.columns for u in updates]),
        np.concatenate([u.pages for u in updates]),
    )
