"""How long the device takes for steps, measured while they run. No torch: the events are the caller's."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Hashable
from typing import Protocol

_KEPT = 5  # measurements of one kind of step; their median counts
_OFTEN = 8  # steps of a kind of which every one is measured
_EVERY = 16  # after that, one of so many


class Event(Protocol):
    """A mark in the device's order of work, with its time (torch.cuda.Event(enable_timing=True))."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def elapsed_time(self, end_event: Event, /) -> float:
        """Milliseconds."""
        ...


class StepTimes:
    """Seconds that the device takes for a kind of step, from marks around some of them. Never waits."""

    def __init__(self, make_event: Callable[[], Event]) -> None:
        self._make_event = make_event
        self._counts: dict[Hashable, int] = {}
        self._found: dict[Hashable, deque[float]] = {}
        self._open: deque[tuple[Hashable, Event, Event]] = deque()
        self._spare: list[tuple[Event, Event]] = []

    def run(self, kind: Hashable, launch: Callable[[], None]) -> None:
        """launch() queues a step of this kind."""
        count = self._counts[kind] = self._counts.get(kind, 0) + 1
        if count > _OFTEN and count % _EVERY:
            launch()
            return
        self._collect()
        first, last = self._spare.pop() if self._spare else (self._make_event(), self._make_event())
        first.record()
        launch()
        last.record()
        self._open.append((kind, first, last))

    def seconds(self, kind: Hashable) -> float | None:
        """None: not measured yet."""
        self._collect()
        found = self._found.get(kind)
        return statistics.median(found) if found else None

    def _collect(self) -> None:
        while self._open and self._open[0][2].query():
            kind, first, last = self._open.popleft()
            self._found.setdefault(kind, deque(maxlen=_KEPT)).append(first.elapsed_time(last) / 1e3)
            self._spare.append((first, last))
