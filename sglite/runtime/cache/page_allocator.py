"""Which KV pages are free: a stack of page numbers. O(n) per call for n pages, no search."""

from __future__ import annotations

import numpy as np

from sglite.runtime.batch import IntArray


class PageAllocator:
    """Pages 0 .. num_pages - 1; each is handed out at most once until it comes back."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._stack = np.arange(num_pages - 1, -1, -1, dtype=np.int32)  # the top is handed out first
        self._top = num_pages

    @property
    def num_free(self) -> int:
        return self._top

    def allocate(self, n: int) -> IntArray:
        """n pages  # int32[n]. The caller has checked num_free."""
        assert n <= self._top, "allocate without enough free pages"
        self._top -= n
        return self._stack[self._top : self._top + n].copy()

    def free(self, pages: IntArray) -> None:
        n = len(pages)
        assert self._top + n <= self.num_pages, "more pages freed than handed out"
        self._stack[self._top : self._top + n] = pages
        self._top += n

    def free_pages(self) -> IntArray:
        """The free page numbers, for checks."""
        return self._stack[: self._top].copy()
