"""Which cached prefix goes first when memory is short. The tree asks for a rank and knows no rule."""

from __future__ import annotations

from typing import Protocol

DONE, NORMAL, LEASED = 0, 1, 2

Rank = tuple[int, float, float]


class Evictable(Protocol):
    """What a rule may look at."""

    last_access: int  # a counter of accesses, not a time
    done: bool  # its program said that nothing will read it again

    def leased_since(self, now: float) -> float | None:
        """When the oldest program that leases it began, time.monotonic() seconds; None without a running lease."""
        ...


def younger_than(since: float) -> Rank:
    """What a program that began at `since` may evict lies below: everything but the leases of older ones."""
    return LEASED, -since, -1.0


class EvictionPolicy(Protocol):
    def rank(self, node: Evictable, now: float) -> Rank:
        """Smaller goes earlier. May grow at any time; one that shrinks is noticed at a lease's end only."""
        ...


class LeaseThenLRU:
    """What no program will read again, then the least recently used, then leased prefixes, those of the youngest
    program first.

    Programs come back to their prefixes in turns, so the least recently used one is the next to be read: by age of
    access a cache that is a little too small would keep nothing that is needed. Giving up the youngest program keeps
    the others whole, and the oldest, which is admitted first, ends soonest.

    A lease is a preference and not a lock: it never keeps a running request from getting memory.
    """

    def rank(self, node: Evictable, now: float) -> Rank:
        since = node.leased_since(now)
        if since is not None:
            return LEASED, -since, node.last_access
        return (DONE if node.done else NORMAL), 0.0, node.last_access


class LRU:
    """The least recently used, whatever programs said: the order that leases are measured against."""

    def rank(self, node: Evictable, now: float) -> Rank:
        return NORMAL, 0.0, node.last_access
