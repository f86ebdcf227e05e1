"""Who may start, and when: a bounded waiting room in front of the engine, fair between tenants.

The engine gets at most `max_running` requests; the others wait here, where leaving costs nothing. When a place
gets free it goes to the tenant with the fewest running requests (the longest-served one last), and within a tenant
to the oldest request. A room that is full says so at once, with a time after which to come again; to a tenant that has
less than its share of the room it gives a place of the one that has the most, whose newest request is sent away.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from sglite.errors import Overloaded, RequestAborted
from sglite.runtime.server.errors import DeadlineExceeded


@dataclass(slots=True, eq=False)
class _Waiting:
    ready: asyncio.Future[None]
    tokens: int
    name: str


class Admission:
    """Used from one event loop."""

    def __init__(self, *, max_running: int, max_waiting: int, max_waiting_tokens: int) -> None:
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._max_waiting_tokens = max_waiting_tokens
        self._running: dict[str, int] = {}
        self._waiting: OrderedDict[str, deque[_Waiting]] = OrderedDict()  # tenants, longest unserved first
        self._waiting_tokens = 0
        self._open = True
        self._mean_duration_s = 1.0  # of a request, exponentially smoothed: what Retry-After is made from
        self._changed = asyncio.Event()

    @property
    def is_open(self) -> bool:
        return self._open

    @property
    def running(self) -> int:
        return sum(self._running.values())

    @property
    def waiting(self) -> int:
        return sum(len(queue) for queue in self._waiting.values())

    @asynccontextmanager
    async def place(
        self, tenant: str, *, tokens: int, deadline: float | None = None, name: str = ""
    ) -> AsyncIterator[float]:
        """Holds a place while the body runs; gives the seconds waited. `deadline`: time.monotonic() seconds. `name` is
        for `abort`.

        Raises Overloaded at once when full, DeadlineExceeded when the place does not come in time, RequestAborted."""
        arrived = time.monotonic()
        if not self._open:
            raise closing()
        if self.running < self._max_running and not self._waiting:
            self._take(tenant)
        else:
            try:
                async with asyncio.timeout(None if deadline is None else deadline - arrived):
                    await self._wait(tenant, tokens, name)
            except TimeoutError:
                raise DeadlineExceeded("the request waited longer than it may take") from None
        started = time.monotonic()
        try:
            yield started - arrived
        finally:
            self._mean_duration_s += 0.1 * (time.monotonic() - started - self._mean_duration_s)
            self._give_back(tenant)

    def abort(self, name: str) -> None:
        """Whoever waits under that name gets RequestAborted."""
        for queue in self._waiting.values():
            for waiting in queue:
                if waiting.name == name and not waiting.ready.done():
                    waiting.ready.set_exception(RequestAborted("the request was aborted"))

    def close(self) -> None:
        """Nobody new; who waits is sent away."""
        self._open = False
        for queue in self._waiting.values():
            for waiting in queue:
                if not waiting.ready.done():
                    waiting.ready.set_exception(closing())
        self._changed.set()

    async def empty(self) -> None:
        """Returns when nobody runs and nobody waits."""
        while self.running or self.waiting:
            self._changed.clear()
            await self._changed.wait()

    async def _wait(self, tenant: str, tokens: int, name: str) -> None:
        if not self._has_room(tenant, tokens):
            raise self._full()
        waiting = _Waiting(asyncio.get_running_loop().create_future(), tokens, name)
        self._waiting.setdefault(tenant, deque()).append(waiting)
        self._waiting_tokens += tokens
        try:
            await waiting.ready
        except asyncio.CancelledError:
            if waiting.ready.done() and not waiting.ready.cancelled() and waiting.ready.exception() is None:
                self._give_back(tenant)  # the place came in the same turn in which the caller left
            raise
        finally:
            self._leave(tenant, waiting)

    def _has_room(self, tenant: str, tokens: int) -> bool:
        """There is room, or the tenant has a right to some of another one's."""
        while self.waiting >= self._max_waiting or self._waiting_tokens + tokens > self._max_waiting_tokens:
            if not self._waiting or tokens > self._max_waiting_tokens:
                return False
            greediest = max(self._waiting, key=lambda t: len(self._waiting[t]))
            share = self._max_waiting / len({*self._waiting, tenant})
            own = len(self._waiting.get(tenant, ()))
            if greediest == tenant or own >= share or own + 1 >= len(self._waiting[greediest]):
                return False
            newest = next((w for w in reversed(self._waiting[greediest]) if not w.ready.done()), None)
            if newest is None:
                return False
            newest.ready.set_exception(self._full())
            self._leave(greediest, newest)
        return True

    def _full(self) -> Overloaded:
        return Overloaded(
            f"{self.running} requests are running and {self.waiting} are waiting; come again later",
            retry_after=self.retry_after(),
        )

    def retry_after(self) -> float:
        """Seconds until about half of those who wait now have started."""
        return min(60.0, max(1.0, self._mean_duration_s * (1 + self.waiting / 2) / self._max_running))

    def _take(self, tenant: str) -> None:
        self._running[tenant] = self._running.get(tenant, 0) + 1

    def _give_back(self, tenant: str) -> None:
        left = self._running[tenant] - 1
        if left:
            self._running[tenant] = left
        else:
            del self._running[tenant]
        self._serve_next()
        self._changed.set()

    def _serve_next(self) -> None:
        while self.running < self._max_running:
            tenants = [t for t, queue in self._waiting.items() if any(not w.ready.done() for w in queue)]
            if not tenants:
                return
            tenant = min(tenants, key=lambda t: self._running.get(t, 0))
            self._waiting.move_to_end(tenant)
            waiting = next(w for w in self._waiting[tenant] if not w.ready.done())
            waiting.ready.set_result(None)
            self._take(tenant)

    def _leave(self, tenant: str, waiting: _Waiting) -> None:
        queue = self._waiting.get(tenant)
        if queue is None or waiting not in queue:
            return  # it was sent away before
        queue.remove(waiting)
        self._waiting_tokens -= waiting.tokens
        if not queue:
            del self._waiting[tenant]
        self._changed.set()


def closing() -> Overloaded:
    error = Overloaded("the server is shutting down", retry_after=5.0)
    error.status = 503
    return error
