"""The step loop's thread goes first: who has work that can wait for a moment asks here.

One interpreter lock does for all threads of a process. A thread that wants it back gets it after milliseconds, and a
device has nothing to do meanwhile. While the loop waits for its device, or for requests, others have the lock to
themselves.
"""

from __future__ import annotations

import threading
import time

MOST_S = 0.004  # that one waits
AGAIN_S = 0.008  # after that in vain, nobody waits for so long: the loop may never rest


class Courtesy:
    """`rest` and `work` are called by the step loop's thread, `after_you` by any other."""

    def __init__(self) -> None:
        self._at_rest = threading.Event()
        self._at_rest.set()
        self._next = 0.0  # time.monotonic() seconds before which nobody waits

    def rest(self) -> None:
        self._at_rest.set()

    def work(self) -> None:
        self._at_rest.clear()

    def after_you(self) -> None:
        """Returns when the loop rests, or after some milliseconds."""
        if self._at_rest.is_set() or time.monotonic() < self._next:
            return
        if not self._at_rest.wait(MOST_S):
            self._next = time.monotonic() + AGAIN_S
