"""Which graphs are captured while requests run: those that are wanted again and again, for a share of the time.

Each capture holds all rows up for 15 to 40 ms, so what is wanted now and then is left for a second without requests.

No torch: a key is whatever tells graphs apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

_SHARE = 0.02  # of all time
_SAVED_UP = 0.1  # seconds of it at most, and at the start
_ASKED = 24  # times before a capture is worth it
_MOST = 64  # keys that are counted

Key = TypeVar("Key")


class Wanted(Generic[Key]):
    """`clock` in seconds. What was spent may exceed what was saved up; then the share has to pay for it first, but not
    for all of a capture that compiled its kernels: for a minute forced text would be drawn token by token."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._asked: dict[Key, int] = {}
        self._saved = _SAVED_UP
        self._at = clock()

    @property
    def may_capture(self) -> bool:
        """Captures have not taken more than their share of late."""
        now = self._clock()
        self._saved = min(_SAVED_UP, self._saved + _SHARE * (now - self._at))
        self._at = now
        return self._saved > 0

    def spend(self, seconds: float) -> None:
        self._saved = max(self._saved - seconds, -_SAVED_UP)

    def ask(self, key: Key) -> None:
        """A graph would have been used that is not there."""
        if len(self._asked) >= _MOST and key not in self._asked:
            self._asked.clear()
        self._asked[key] = self._asked.get(key, 0) + 1

    def take(self, *, idle: bool) -> Key | None:
        """The one that was asked for most often, if it may be captured now. `idle`: nobody waits."""
        if not self._asked or not (idle or self.may_capture):
            return None
        key = max(self._asked, key=lambda one: self._asked[one])
        if not idle and self._asked[key] < _ASKED:
            return None
        del self._asked[key]
        return key
