"""When forced text enters as new tokens of one step, and when it is drawn token by token under its mask.

The text is the same either way. A run of forced tokens that enters at once saves its row steps and makes one step of
all rows dearer. With N rows, of which some save s steps in all, and what the device takes for a step of so many tokens,

    jump     N + s tokens in the time of a step of N + s tokens
    draw     N tokens     in the time of a step of N

so jumping pays where s / N > seconds(N + s) / seconds(N) - 1: nearly always where a step reads weights most of its
time, and never where its time grows with its tokens. Both are measured by the device while it runs; beside one that
works while the host does, many rows never jump: what the host does for each of them is not in those times.

Rows that no grammar constrains gain nothing by the jumps of others. Where there are some, dearer steps take a small
share of all time, and no more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from sglite.runtime.scheduler.turns import StepSeconds, unmeasured

_DEARER = 0.125  # by how much a step of several tokens a row is dearer, until it was measured
_MANY_ROWS = 96  # from there on the host's work for rows that jump is what a step waits for, and projections compute
_SHARE_BESIDE = 0.015  # of the time of free rows that others' jumps may take
_SAVED_UP_S = 0.003  # of it, at most


class JumpPolicy:
    """`overlaps`: the device works while the host goes on; where it does not, each token is worth its own work and
    jumping always saves steps. `step_seconds`: see Executor."""

    def __init__(
        self,
        *,
        overlaps: bool,
        step_seconds: StepSeconds = unmeasured,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._overlaps = overlaps
        self._step_seconds = step_seconds
        self._clock = clock
        self._saved_up = _SAVED_UP_S
        self._at = clock()

    def pays(self, saved: Mapping[int, int], num_rows: int, *, free: bool = False) -> bool:
        """Whether the rows should jump, each saving so many steps, in a batch of `num_rows`. `free`: some of these are
        not constrained."""
        if not saved:
            return False
        if not self._overlaps:
            return True
        steps = sum(saved.values())
        return self.may_enter(num_rows) and self.enter(steps, steps, num_rows, free=free)

    def may_enter(self, num_rows: int) -> bool:
        """A device that works beside the host takes forced text of so many rows at once, where it pays."""
        return num_rows < _MANY_ROWS

    def enter(self, saved: float, tokens: int, num_rows: int, *, beside: int = 0, free: bool = False) -> bool:
        """Whether `tokens` more should enter a step of the rows, which saves so many of their steps; then they do.
        `beside`: other tokens that enter it anyway, besides one a row."""
        several = self._step_seconds(num_rows, num_rows + beside + tokens)
        if several is None:
            return False
        one = self._step_seconds(num_rows, num_rows + beside)
        if not one or not several:  # not measured
            return saved >= _DEARER * num_rows
        return saved >= (several / one - 1) * num_rows and (not free or self._spend(several - one))

    def _spend(self, seconds: float) -> bool:
        """Whether free rows may be held up so long."""
        now = self._clock()
        self._saved_up = min(_SAVED_UP_S, self._saved_up + _SHARE_BESIDE * (now - self._at))
        self._at = now
        if seconds > self._saved_up:
            return False
        self._saved_up -= max(seconds, 0.0)
        return True
