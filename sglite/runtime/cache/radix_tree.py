"""A radix tree from token prefixes to KV pages.

    root(namespace) -- node [the cat sat] -- node [on the mat]
                                          \\- node [up]

A node holds a run of whole pages. Rules that everything here keeps:

* a locked node's parent is locked at least as often; locks are counted along the path to the root;
* splitting a node keeps the object for the *lower* part, so that a handle to it stays valid;
* only unlocked leaves are evicted, from their tail, so that what stays is a prefix;
* a detached subtree (its KV turned out wrong) is matched by nobody and its pages come back when its locks go.

`num_evictable` counts pages of unlocked nodes, `num_protected` of locked ones; both are kept up to date in O(path).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from sglite.runtime.batch import IntArray
from sglite.runtime.cache.eviction import EvictionPolicy, Rank

_NO_TOKENS = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class Namespace:
    """Whose prefixes these are. A typed key: tenant "A" and adapter "A" are two namespaces."""

    tenant: str = ""
    adapter: str = ""


class Node:
    """A run of tokens and the pages that hold their KV. Written by RadixTree only."""

    __slots__ = (
        "children",
        "detached",
        "done",
        "last_access",
        "leases",
        "locks",
        "pages",
        "parent",
        "queued",
        "tokens",
    )

    def __init__(self, parent: Node | None, tokens: IntArray, pages: IntArray) -> None:
        self.parent = parent
        self.tokens = tokens  # int32[k * page_size]
        self.pages = pages  # int32[k]
        self.children: dict[int | bytes, Node] = {}
        self.locks = 0
        self.last_access = 0
        self.leases: dict[str, tuple[float, float]] = {}  # holder -> (end, since), time.monotonic() seconds
        self.done = False
        self.detached = False
        self.queued: Rank | None = None  # its smallest rank in the eviction heap

    def leased_since(self, now: float) -> float | None:
        return min((since for end, since in self.leases.values() if end > now), default=None)


class RadixTree:
    def __init__(self, page_size: int, policy: EvictionPolicy, release_pages: Callable[[IntArray], None]) -> None:
        self.page_size = page_size
        self.num_evictable = 0
        self.num_protected = 0
        self._policy = policy
        self._release_pages = release_pages
        self._roots: dict[Namespace, Node] = {}
        self._ticks = 0
        self._pushes = 0
        self._heap: list[tuple[Rank, int, Node]] = []
        self._lease_ends: list[tuple[float, int, Node]] = []
        self._held_by: dict[str, dict[Node, None]] = {}  # holder -> the nodes that it leases
        self._detached_locked: set[Node] = set()

    # -- reading

    def match_length(self, namespace: Namespace, tokens: IntArray) -> int:
        """Tokens of the longest cached prefix. Changes nothing."""
        root = self._roots.get(namespace)
        return 0 if root is None else self._walk(root, tokens)[1]

    def path_pages(self, node: Node) -> IntArray:
        """Pages from the root to the end of `node`  # int32[k]"""
        parts: list[IntArray] = []
        at: Node | None = node
        while at is not None:
            parts.append(at.pages)
            at = at.parent
        return np.concatenate(parts[::-1])

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots, detached ones that are still locked included."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())
        yield from self._detached_locked

    # -- matching and locking

    def acquire(self, namespace: Namespace, tokens: IntArray) -> tuple[Node, int]:
        """Lock the longest cached prefix; returns its last node and its length in tokens."""
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Node(None, _NO_TOKENS, _NO_TOKENS)
        node, length, inside = self._walk(root, tokens)
        if inside < len(node.tokens):
            node = self._split(node, inside)
        self._lock(node)
        self._touch(node)
        return node, length

    def release(self, node: Node) -> None:
        """Undo one lock of the path to `node`."""
        at: Node | None = node
        while at is not None:
            at.locks -= 1
            assert at.locks >= 0, "released more often than locked"
            if at.locks == 0 and at.parent is not None:
                self.num_protected -= len(at.pages)
                if at.detached:
                    self._detached_locked.discard(at)
                    self._release_pages(at.pages)
                else:
                    self.num_evictable += len(at.pages)
                    if not at.children:
                        self._push(at)
            at = at.parent

    # -- growing

    def continues(self, node: Node, tokens: IntArray) -> bool:
        """Some cached prefix goes on after `node` with the first page of `tokens`."""
        return self._key(tokens, 0) in node.children

    def append(self, node: Node, tokens: IntArray, pages: IntArray) -> Node:
        """A new locked leaf below the locked `node`; the caller's lock moves from `node` to it.
        Requires not continues(node, tokens)."""
        child = Node(node, tokens, pages)
        child.locks = 1
        node.children[self._key(tokens, 0)] = child
        self.num_protected += len(pages)
        self._touch(child)
        return child

    def insert(self, node: Node, tokens: IntArray, pages: IntArray) -> tuple[Node, int]:
        """Add tokens below the locked `node` as far as they are not there yet. Returns the last node, to which the
        caller's lock moves, and how many leading pages were there already (the caller keeps those of `pages`)."""
        last, length, inside = self._walk(node, tokens)
        if inside < len(last.tokens):
            last = self._split(last, inside)
        self._lock_between(node, last)
        known = length // self.page_size
        if known < len(pages):
            last = self.append(last, tokens[length:], pages[known:])
        self._touch(last)
        return last, known

    # -- programs

    def lease(self, node: Node, holder: str, *, end: float, since: float, now: float) -> None:
        """`holder`, which began at `since`, reads the prefix that ends in `node` again before `end`."""
        self._expire_leases(now)
        known = node.leases.get(holder, (end, since))
        node.leases[holder] = max(end, known[0]), min(since, known[1])
        self._held_by.setdefault(holder, {})[node] = None
        self._pushes += 1
        heapq.heappush(self._lease_ends, (end, self._pushes, node))

    def end_leases(self, node: Node, holder: str) -> None:
        """`holder` is through with the path to `node`. What it alone went on with goes first now; a first part
        that nothing splits off may be what its next run begins with, and stays."""
        path: list[Node] = []
        at: Node | None = node
        while at is not None and at.parent is not None:
            path.append(at)
            at = at.parent
        held = [i for i, n in enumerate(path) if self._end_lease(n, holder)]
        for n in path[: held[-1] + 1] if held else ():
            if n.leases or len(n.children) > 1 or n is path[-1]:
                return
            n.done = True
            self._leaf_again(n)

    def end_all_leases(self, holder: str) -> None:
        """`holder` is over: it reads nothing again."""
        while nodes := self._held_by.get(holder):
            node = next(reversed(nodes))
            if node.detached or not len(node.pages):  # gone from the tree
                self._end_lease(node, holder)
            else:
                self.end_leases(node, holder)

    def _end_lease(self, node: Node, holder: str) -> bool:
        nodes = self._held_by.get(holder)
        if nodes is not None:
            nodes.pop(node, None)
            if not nodes:
                del self._held_by[holder]
        if node.leases.pop(holder, None) is None:
            return False
        if not node.detached:
            self._leaf_again(node)  # its rank has shrunk
        return True

    def mark_done(self, node: Node, above: int, length: int) -> None:
        """Nothing will read tokens `above` .. `length` of the path to `node` again: they go first."""
        at: Node | None = node
        while at is not None and at.parent is not None and length - len(at.tokens) >= above:
            if at.leases or len(at.children) > 1:
                return
            at.done = True
            length -= len(at.tokens)
            at = at.parent

    def ancestor_at(self, node: Node, length: int, at_tokens: int) -> Node:
        """The node of the path to `node` (which ends at `length` tokens) that ends at `at_tokens`, rounded down to
        whole pages, made by a split if need be."""
        at_tokens -= at_tokens % self.page_size
        at = node
        while at.parent is not None and length - len(at.tokens) >= at_tokens:
            length -= len(at.tokens)
            at = at.parent
        if at.parent is None or at_tokens >= length:
            return at
        return self._split(at, len(at.tokens) - (length - at_tokens))

    # -- shrinking

    def evict(self, num_pages: int, now: float, below: Rank | None = None) -> int:
        """Free at least `num_pages` pages if that many are evictable (with ranks `below` that one). Returns how many it
        freed."""
        self._expire_leases(now)
        freed = 0
        while freed < num_pages and self._heap and (below is None or self._heap[0][0] < below):
            rank, _, node = heapq.heappop(self._heap)
            if node.queued == rank:
                node.queued = None
            if node.locks or node.children or node.detached or not len(node.pages):
                continue
            current = self._policy.rank(node, now)
            if current > rank:
                self._push(node, current)
                continue
            freed += self._trim(node, min(num_pages - freed, len(node.pages)))
            if len(node.pages):
                self._push(node, current)
        return freed

    def detach(self, node: Node) -> None:
        """Take `node` and everything below it out of the tree: its KV is not what its tokens say."""
        if node.detached or node.parent is None:
            return
        del node.parent.children[self._key(node.tokens, 0)]
        self._leaf_again(node.parent)
        stack = [node]
        while stack:
            at = stack.pop()
            at.detached = True
            if at.locks:
                self._detached_locked.add(at)
            else:
                self.num_evictable -= len(at.pages)
                self._release_pages(at.pages)
            stack.extend(at.children.values())

    def clear(self) -> None:
        """Drop every unlocked node."""
        self.evict(self.num_evictable, 0.0)
        for namespace in [n for n, root in self._roots.items() if not root.children and not root.locks]:
            del self._roots[namespace]

    # -- inside

    def _key(self, tokens: IntArray, at: int) -> int | bytes:
        if self.page_size == 1:
            return int(tokens[at])
        return tokens[at : at + self.page_size].tobytes()

    def _walk(self, node: Node, tokens: IntArray) -> tuple[Node, int, int]:
        """Follow whole pages of `tokens` below `node`: (last node, tokens matched, tokens matched within it).
        Only `node` itself counts as wholly matched without looking."""
        page = self.page_size
        end = len(tokens) - len(tokens) % page
        at, inside = 0, len(node.tokens)
        while at < end:
            child = node.children.get(self._key(tokens, at))
            if child is None:
                break
            common = _common_prefix(child.tokens, tokens[at:end])
            inside = common - common % page
            node = child
            at += inside
            if inside < len(child.tokens):
                break
        return node, at, inside

    def _split(self, node: Node, at: int) -> Node:
        """Cut `node` after `at` tokens; returns the new upper part. `node` stays the lower part."""
        parent = node.parent
        assert parent is not None
        assert 0 < at < len(node.tokens)
        cut = at // self.page_size
        upper = Node(parent, node.tokens[:at], node.pages[:cut])
        upper.locks, upper.last_access, upper.done = node.locks, node.last_access, node.done
        upper.detached = node.detached
        if upper.detached:
            self._detached_locked.add(upper)
        else:
            parent.children[self._key(node.tokens, 0)] = upper
        upper.children[self._key(node.tokens, at)] = node
        node.tokens, node.pages, node.parent = node.tokens[at:], node.pages[cut:], upper
        return upper

    def _lock(self, node: Node) -> None:
        at: Node | None = node
        while at is not None:
            if at.locks == 0 and at.parent is not None:
                self.num_evictable -= len(at.pages)
                self.num_protected += len(at.pages)
            at.locks += 1
            at = at.parent

    def _lock_between(self, upper: Node, lower: Node) -> None:
        """Add one lock to the path from below `upper` (locked by the caller) down to `lower`."""
        at = lower
        while at is not upper:
            if at.locks == 0:
                self.num_evictable -= len(at.pages)
                self.num_protected += len(at.pages)
            at.locks += 1
            assert at.parent is not None
            at = at.parent

    def _touch(self, node: Node) -> None:
        self._ticks += 1
        at: Node | None = node
        while at is not None:
            at.last_access = self._ticks
            at.done = False
            at = at.parent

    def _push(self, node: Node, rank: Rank | None = None) -> None:
        """Make an unlocked leaf a candidate. Ranks in the heap may be old: they only grow, and evict() looks again."""
        rank = rank or self._policy.rank(node, 0.0)
        if node.queued is not None and node.queued <= rank:
            return
        node.queued = rank
        self._pushes += 1
        heapq.heappush(self._heap, (rank, self._pushes, node))

    def _leaf_again(self, node: Node) -> None:
        if not node.children and not node.locks and node.parent is not None and len(node.pages):
            self._push(node)

    def _expire_leases(self, now: float) -> None:
        while self._lease_ends and self._lease_ends[0][0] <= now:
            node = heapq.heappop(self._lease_ends)[2]
            for holder in [holder for holder, lease in node.leases.items() if lease[0] <= now]:
                self._end_lease(node, holder)
            if not node.locks and not node.children and not node.detached:
                self._push(node, self._policy.rank(node, now))

    def _trim(self, node: Node, num_pages: int) -> int:
        """Drop the last pages of an unlocked leaf, the leaf itself when nothing is left."""
        keep = len(node.pages) - num_pages
        self._release_pages(node.pages[keep:])
        self.num_evictable -= num_pages
        if keep == 0:
            parent = node.parent
            assert parent is not None
            del parent.children[self._key(node.tokens, 0)]
            self._leaf_again(parent)
        node.tokens, node.pages = node.tokens[: keep * self.page_size], node.pages[:keep]
        return num_pages


def _common_prefix(a: IntArray, b: IntArray) -> int:
    n = min(len(a), len(b))
    different = a[:n] != b[:n]
    first = int(different.argmax()) if n else 0
    return first if n and different[first] else n
