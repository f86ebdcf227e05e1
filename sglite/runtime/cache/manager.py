"""Who may use which KV page: the one owner of tree, allocator and locks.

Every page is in exactly one place, and after every call

    free + cached (evictable) + protected (locked) + owned (by running rows) == total

A row's pages: those of its prefix belong to the tree and are locked, the rest are owned.

    row positions   0 ......... prefix.length ........................ end of the row's pages
                    | tree's, locked | owned: being computed            |
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from sglite.runtime.batch import IntArray
from sglite.runtime.cache.eviction import EvictionPolicy, LeaseThenLRU, younger_than
from sglite.runtime.cache.page_allocator import PageAllocator
from sglite.runtime.cache.radix_tree import Namespace, Node, RadixTree


@dataclass(slots=True, eq=False)
class Prefix:
    """A locked prefix in the tree. Valid until it is given back by `release`, `finish` or `drop`."""

    namespace: Namespace
    node: Node
    length: int  # tokens, a multiple of the page size

    @property
    def tainted(self) -> bool:
        """Some of it was found to hold wrong KV after it was matched."""
        return self.node.detached


@dataclass(frozen=True, slots=True)
class PageCounts:
    total: int
    free: int
    cached: int
    protected: int
    owned: int

    @property
    def balanced(self) -> bool:
        return self.free + self.cached + self.protected + self.owned == self.total


class CacheManager:
    def __init__(
        self, num_pages: int, page_size: int, *, enabled: bool = True, policy: EvictionPolicy | None = None
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.enabled = enabled
        self.num_owned = 0
        self.num_evicted = 0  # pages, ever
        self._allocator = PageAllocator(num_pages)
        self._tree = RadixTree(page_size, policy or LeaseThenLRU(), self._allocator.free)

    # -- room

    @property
    def available(self) -> int:
        """Pages that `allocate` can give."""
        return self._allocator.num_free + self._tree.num_evictable

    @property
    def counts(self) -> PageCounts:
        return PageCounts(
            self.num_pages,
            self._allocator.num_free,
            self._tree.num_evictable,
            self._tree.num_protected,
            self.num_owned,
        )

    def allocate(self, n: int, now: float, *, since: float | None = None) -> IntArray | None:
        """n owned pages  # int32[n], evicting cached ones if need be; None when there are not that many. A program
        that began at `since` leaves alone what older ones lease."""
        short = n - self._allocator.num_free
        if short > 0:
            if short > self._tree.num_evictable:
                return None
            evicted = self._tree.evict(short, now, None if since is None else younger_than(since))
            self.num_evicted += evicted
            if evicted < short:
                return None
        self.num_owned += n
        return self._allocator.allocate(n)

    def free(self, pages: IntArray) -> None:
        """Give owned pages back."""
        self.num_owned -= len(pages)
        self._allocator.free(pages)

    # -- prefixes

    def match_length(self, namespace: Namespace, tokens: IntArray) -> int:
        """Tokens of `tokens` that are cached. Changes nothing."""
        return self._tree.match_length(namespace, tokens) if self.enabled else 0

    def acquire(self, namespace: Namespace, tokens: IntArray) -> Prefix:
        """Lock the longest cached prefix of `tokens`; it may be empty."""
        node, length = self._tree.acquire(namespace, tokens if self.enabled else tokens[:0])
        return Prefix(namespace, node, length)

    def pages_of(self, prefix: Prefix) -> IntArray:
        """The pages of a locked prefix  # int32[length / page_size]"""
        return self._tree.path_pages(prefix.node)

    def extend(self, prefix: Prefix, tokens: IntArray, pages: IntArray) -> bool:
        """Show the owned `pages`, which hold the whole pages of `tokens` that follow the prefix, to others while
        their KV is still being computed: whoever matches them runs in the same step or a later one.

        False (and nothing changed) where the cache has such a continuation already: the row keeps its own pages.
        """
        if not self.enabled or prefix.tainted or not len(pages) or self._tree.continues(prefix.node, tokens):
            return False
        prefix.node = self._tree.append(prefix.node, tokens.copy(), pages)
        prefix.length += len(tokens)
        self.num_owned -= len(pages)
        return True

    def commit(self, prefix: Prefix, tokens: IntArray, pages: IntArray) -> None:
        """The row is over: cache the computed `tokens` that follow the prefix, as far as they fill pages; give the
        other owned `pages` back. The prefix stays locked and grows to what was cached."""
        whole = len(tokens) - len(tokens) % self.page_size
        num_whole = whole // self.page_size
        if not self.enabled or prefix.tainted or not whole:
            self.free(pages)
            return
        prefix.node, known = self._tree.insert(prefix.node, tokens[:whole].copy(), pages[:num_whole])
        prefix.length += whole
        self.num_owned -= num_whole - known
        self.free(pages[:known])
        self.free(pages[num_whole:])

    def release(self, prefix: Prefix) -> None:
        self._tree.release(prefix.node)

    def discard(self, namespace: Namespace, tokens: IntArray, start: int) -> None:
        """The KV of `tokens` from `start` on turned out wrong: nobody shall match it any more. Who has it locked
        sees `Prefix.tainted`; its pages come back with the locks."""
        prefix = self.acquire(namespace, tokens)
        if start < prefix.length:
            keep = self._tree.ancestor_at(prefix.node, prefix.length, start)
            below = prefix.node
            while below.parent is not None and below.parent is not keep:
                below = below.parent
            self._tree.detach(below)
        self.release(prefix)

    def shared_groups(self, prefixes: Sequence[Prefix], min_tokens: int) -> list[tuple[int, list[int]]]:
        """Disjoint groups of at least two prefixes that begin alike: (tokens in common >= min_tokens, indices).

        Of all such groupings one that saves the most reads, (group size - 1) x tokens in common, summed over groups.
        """
        below: dict[Node, list[int]] = {}  # node -> prefixes whose path goes through it
        lengths: dict[Node, int] = {}  # node -> tokens up to its end
        for i, prefix in enumerate(prefixes):
            node, length = prefix.node, prefix.length
            while length >= min_tokens and node.parent is not None:
                below.setdefault(node, []).append(i)
                lengths[node] = length
                length -= len(node.tokens)
                node = node.parent
        best: dict[Node, tuple[int, list[Node]]] = {}  # node -> (tokens saved, the groups' nodes) from it down
        for node in sorted(lengths, key=lengths.__getitem__, reverse=True):
            deeper = [best[child] for child in node.children.values() if child in best]
            saved = sum(s for s, _ in deeper)
            own = (len(below[node]) - 1) * lengths[node]
            best[node] = (own, [node]) if own > saved else (saved, [n for _, nodes in deeper for n in nodes])
        tops = [best[node] for node in lengths if node.parent not in lengths]
        return [(lengths[n], below[n]) for saved, nodes in tops if saved for n in nodes]

    # -- programs

    def lease(self, prefix: Prefix, num_tokens: int, *, holder: str, end: float, since: float, now: float) -> None:
        """Keep the first `num_tokens` of a locked prefix for `holder`, which began at `since`, until `end`, as far as
        memory allows."""
        boundary = self._tree.ancestor_at(prefix.node, prefix.length, num_tokens)
        if boundary.parent is None or boundary.detached:
            return
        self._tree.lease(boundary, holder, end=end, since=since, now=now)

    def end_leases(self, prefix: Prefix, holder: str) -> None:
        """`holder` reads nothing of a locked prefix again."""
        self._tree.end_leases(prefix.node, holder)

    def end_program(self, holder: str) -> None:
        """`holder` reads nothing again."""
        self._tree.end_all_leases(holder)

    def mark_done(self, prefix: Prefix, above: int) -> None:
        """Nothing reads the tokens from `above` on of a locked prefix again: they are evicted first."""
        self._tree.mark_done(prefix.node, above, prefix.length)

    # -- the whole

    def flush(self) -> bool:
        """Drop every prefix that is not locked. True when the cache is empty."""
        self._tree.clear()
        return self._tree.num_protected == 0

    def problems(self, owned: Iterable[IntArray]) -> list[str]:
        """What is wrong with the accounting, given all rows' owned pages; empty when all is well. O(all pages)."""
        found: list[str] = []
        if not self.counts.balanced:
            found.append(f"page counts do not add up: {self.counts}")
        nodes = list(self._tree.nodes())
        evictable = sum(len(n.pages) for n in nodes if not n.locks)
        protected = sum(len(n.pages) for n in nodes if n.locks)
        if (evictable, protected) != (self._tree.num_evictable, self._tree.num_protected):
            found.append(f"tree holds {evictable} evictable and {protected} protected pages: {self.counts}")
        row_pages = list(owned)
        num_owned = sum(len(p) for p in row_pages)
        if num_owned != self.num_owned:
            found.append(f"rows own {num_owned} pages: {self.counts}")
        every = np.concatenate([self._allocator.free_pages(), *(n.pages for n in nodes), *row_pages])
        if len(every) != self.num_pages or len(np.unique(every)) != self.num_pages:
            found.append(f"{len(np.unique(every))} different pages in {len(every)} places of {self.num_pages}")
        for node in nodes:
            if len(node.tokens) != len(node.pages) * self.page_size:
                found.append(f"a node of {len(node.tokens)} tokens has {len(node.pages)} pages")
            if node.parent is not None and node.parent.parent is not None and node.parent.locks < node.locks:
                found.append("a node is locked more often than its parent")
        return found
