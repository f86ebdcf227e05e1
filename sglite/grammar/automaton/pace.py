"""How a thread that computes in Python leaves the interpreter to a step loop beside it."""

from __future__ import annotations

import time

_WORK_S = 0.0001
_REST_S = 0.0025
_EVERY = 8  # calls of which one looks at the clock


class Pace:
    """Called every few microseconds: after a tenth of a millisecond of work it sleeps for two steps or so. A step takes
    the lock back a dozen times, and may find it taken each time while somebody works.
    """

    def __init__(self) -> None:
        self._calls = 0
        self._began = time.perf_counter()

    def __call__(self) -> None:
        self._calls += 1
        if self._calls % _EVERY:
            return
        if time.perf_counter() - self._began > _WORK_S:
            time.sleep(_REST_S)
            self._began = time.perf_counter()
