"""What the best cache could have done with a recorded trace of accesses, to measure the real one against.

An access reads a prompt and leaves prompt and output in the cache. All accesses together are a tree of segments, cut
wherever two of them part or one ends:

    insert all      -> each access is a path of whole segments
    optimal_hits    -> replay; over capacity, what is read again last goes first, tails before heads (Belady's MIN)

A token can only be hit together with all before it, and it is never read later than they are, so dropping the tokens
whose next read lies farthest keeps prefixes whole by itself. Each access is taken as over before the next begins:
rows that run side by side lock memory, so the real optimum lies lower.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from sglite.runtime.batch import IntArray

_NEVER = 1 << 60


@dataclass(frozen=True, slots=True, eq=False)
class Access:
    """`tokens`: prompt and output, as far as their KV was computed  # int32[n]. The first `num_read` may come from the
    cache (the prompt without its last token)."""

    tokens: IntArray
    num_read: int


@dataclass(slots=True, eq=False)
class _Segment:
    tokens: IntArray
    depth: int  # tokens before it
    children: dict[int, _Segment] = field(default_factory=dict)
    reads: list[int] = field(default_factory=list)  # accesses that read it, in order
    at: int = 0  # how many of these are over
    cached: int = 0  # leading tokens that the cache holds

    @property
    def next_read(self) -> int:
        return self.reads[self.at] if self.at < len(self.reads) else _NEVER


def distinct_tokens(sequences: Sequence[IntArray]) -> int:
    """Tokens that differ in themselves or in what comes before them: the least that a cache without a limit
    computes."""
    root = _tree(sequences)
    total, stack = 0, [root]
    while stack:
        segment = stack.pop()
        total += len(segment.tokens)
        stack.extend(segment.children.values())
    return total


def optimal_hits(accesses: Sequence[Access], capacity: int) -> int:
    """Tokens that the best eviction finds in a cache of `capacity` tokens, summed over the accesses."""
    root = _tree([a.tokens[: a.num_read] for a in accesses] + [a.tokens for a in accesses])
    reads = [_path(root, a.tokens[: a.num_read]) for a in accesses]
    paths = [_path(root, a.tokens) for a in accesses]
    for number, path in enumerate(reads):
        for segment in path:
            segment.reads.append(number)
    heap: list[tuple[int, int, int, _Segment]] = []
    hits = held = pushes = 0
    for read, path in zip(reads, paths, strict=True):
        for segment in read:
            hits += segment.cached
            if segment.cached < len(segment.tokens):
                break
        for segment in read:
            segment.at += 1
        for segment in path:
            held += len(segment.tokens) - segment.cached
            segment.cached = len(segment.tokens)
            pushes += 1
            heapq.heappush(heap, (-segment.next_read, -segment.depth, pushes, segment))
        while held > capacity:
            when, _, _, segment = heapq.heappop(heap)
            if -when != segment.next_read or not segment.cached:
                continue  # it was read since: a newer entry stands for it
            dropped = min(segment.cached, held - capacity)
            segment.cached -= dropped
            held -= dropped
            if segment.cached:
                pushes += 1
                heapq.heappush(heap, (when, -segment.depth, pushes, segment))
    return hits


def _tree(sequences: Sequence[IntArray]) -> _Segment:
    root = _Segment(np.empty(0, np.int32), 0)
    for sequence in sequences:
        _insert(root, sequence)
    return root


def _insert(root: _Segment, tokens: IntArray) -> None:
    at, segment = 0, root
    while at < len(tokens):
        child = segment.children.get(int(tokens[at]))
        if child is None:
            segment.children[int(tokens[at])] = _Segment(tokens[at:], at)
            return
        common = _common(child.tokens, tokens[at:])
        if common < len(child.tokens):
            _split(segment, child, common)
            child = segment.children[int(tokens[at])]
        at += common
        segment = child


def _split(parent: _Segment, lower: _Segment, at: int) -> None:
    upper = _Segment(lower.tokens[:at], lower.depth)
    parent.children[int(lower.tokens[0])] = upper
    upper.children[int(lower.tokens[at])] = lower
    lower.tokens, lower.depth = lower.tokens[at:], lower.depth + at


def _path(root: _Segment, tokens: IntArray) -> list[_Segment]:
    """The whole segments that make up `tokens`, which was inserted."""
    path: list[_Segment] = []
    at, segment = 0, root
    while at < len(tokens):
        segment = segment.children[int(tokens[at])]
        path.append(segment)
        at += len(segment.tokens)
    return path


def _common(a: IntArray, b: IntArray) -> int:
    n = min(len(a), len(b))
    different = a[:n] != b[:n]
    first = int(different.argmax()) if n else 0
    return first if n and different[first] else n
