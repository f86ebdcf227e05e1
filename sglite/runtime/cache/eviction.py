"""Which cached prefix goes first when memory is short. The tree asks for a rank and knows no rule."""

from __future__ import annotations

from typing import Protocol

DONE, NORMAL, LEASED = 0, 1, 2


class Evictable(Protocol):
    """What a rule may look at."""

    last_access: int  # a counter of accesses, not a time
    done: bool  # its program said that nothing will read it again

    def lease_end(self, now: float) -> float:
        """time.monotonic() seconds of the last running lease, 0.0 without one."""
        ...


class EvictionPolicy(Protocol):
    def rank(self, node: Evictable, now: float) -> tuple[int, float]:
        """Smaller goes earlier. May grow at any time; a rank that shrinks is only noticed after a lease's end."""
        ...


class LeaseThenLRU:
    """What no program will read again, then the least recently used, then leased prefixes, first to end first.

    A lease is a preference and not a lock: it never keeps a running request from getting memory.
    """

    def rank(self, node: Evictable, now: float) -> tuple[int, float]:
        lease_end = node.lease_end(now)
        if lease_end:
            return LEASED, lease_end
        return (DONE if node.done else NORMAL), node.last_access


class LRU:
    """The least recently used, whatever programs said: the order that leases are measured against."""

    def rank(self, node: Evictable, now: float) -> tuple[int, float]:
        return NORMAL, node.last_access
