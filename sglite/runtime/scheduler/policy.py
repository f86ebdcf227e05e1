"""In which order waiting requests are admitted: an order is a class of one method, the list knows none of them."""

from __future__ import annotations

from typing import Any, Protocol

from sglite.runtime.request import Request

OrderKey = tuple[Any, ...]


class AdmissionOrder(Protocol):
    def key(self, request: Request) -> OrderKey:
        """Smaller goes earlier. Does not change while the request waits."""
        ...


class FirstCome:
    """Priority, then arrival."""

    def key(self, request: Request) -> OrderKey:
        return request.job.priority, request.job.arrival, request.sequence


class OldestProgram:
    """Priority, then the program that began first, then its call with the longest way to the program's end, then the
    longest cached prefix, then arrival.

    A call without a program is a program of its own. Calls of one program stand together, so siblings are neighbours
    and their common prefix is computed once.
    """

    def key(self, request: Request) -> OrderKey:
        job = request.job
        program = job.program
        if program is None:
            return job.priority, job.arrival, "", 0, 0, job.arrival, request.sequence
        began = program.arrival or job.arrival
        remaining, cached = -program.remaining, -request.cached_hint
        return job.priority, began, program.program_id, remaining, cached, job.arrival, request.sequence


def make_order(name: str) -> AdmissionOrder:
    return {"fcfs": FirstCome, "program": OldestProgram}[name]()


class WaitingList:
    """Requests that want a row, in the order's order; whoever has waited `max_wait_s` goes before, by arrival."""

    def __init__(self, order: AdmissionOrder, *, max_wait_s: float, gang_wait_s: float) -> None:
        self._order = order
        self._max_wait_s = max_wait_s
        self._gang_wait_s = gang_wait_s
        self._requests: list[Request] = []
        self._keys: dict[Request, OrderKey] = {}
        self._gangs: dict[tuple[str, str | None], int] = {}  # waiting requests of each group of siblings
        self._next_starving = 0.0
        self._dirty = False

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: Request) -> bool:
        return request in self._keys

    def add(self, request: Request) -> None:
        self._requests.append(request)
        self._keys[request] = self._order.key(request)
        gang = _gang(request)
        if gang is not None:
            self._gangs[gang] = self._gangs.get(gang, 0) + 1
        self._dirty = True

    def remove(self, request: Request) -> None:
        del self._keys[request]
        self._requests.remove(request)
        gang = _gang(request)
        if gang is not None:
            self._gangs[gang] -= 1
            if not self._gangs[gang]:
                del self._gangs[gang]

    def ordered(self, now: float) -> list[Request]:
        """All of them, first to be admitted first; valid until the next change."""
        if self._dirty or now >= self._next_starving:
            starving_before = now - self._max_wait_s
            arrivals = [r.job.arrival for r in self._requests if r.job.arrival > starving_before]
            self._next_starving = min(arrivals, default=now) + self._max_wait_s
            self._requests.sort(key=lambda r: self._sort_key(r, starving_before))
            self._dirty = False
        return self._requests

    def changed(self) -> None:
        """Some request's place in the order is another one now."""
        self._dirty = True

    def has_starved(self, request: Request, now: float) -> bool:
        return now - request.job.arrival >= self._max_wait_s

    def waits_for_siblings(self, request: Request, now: float) -> bool:
        """Its siblings were announced, are not all here yet, and it came so recently that they may still come."""
        gang = _gang(request)
        if gang is None or now - request.job.arrival >= self._gang_wait_s or request.num_output:
            return False
        program = request.job.program
        assert program is not None
        return self._gangs[gang] < program.siblings

    def _sort_key(self, request: Request, starving_before: float) -> OrderKey:
        arrival = request.job.arrival
        if request.row >= 0:  # it continues a held row: no new admission, so nothing goes before it
            return -1, arrival, request.sequence
        return (0, arrival, request.sequence) if arrival <= starving_before else (1, *self._keys[request])


def _gang(request: Request) -> tuple[str, str | None] | None:
    program = request.job.program
    return None if program is None or program.siblings < 2 else (program.program_id, program.parent)
