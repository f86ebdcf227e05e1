"""When forced text enters as new tokens of one step, and when it is drawn token by token under its mask.

The text is the same either way. A run of forced tokens that enters at once saves its row steps and makes one step of
all rows dearer. With N rows, of which some save s steps in all, and what the device takes for a step of so many tokens,

    jump     N + s tokens in the time of a step of N + s tokens
    draw     N tokens     in the time of a step of N

so jumping pays where s / N > seconds(N + s) / seconds(N) - 1: nearly always where a step reads weights most of its
time, and never where its time grows with its tokens. Both are measured by the device while it runs; beside one that
works while the host does, many rows never jump: what the host does for each of them is not in those times.
"""

from __future__ import annotations

from collections.abc import Mapping

from sglite.runtime.scheduler.turns import StepSeconds, unmeasured

_DEARER = 0.125  # by how much a step of several tokens a row is dearer, until it was measured
_MANY_ROWS = 96  # from there on the host's work for rows that jump is what a step waits for, and projections compute


class JumpPolicy:
    """`overlaps`: the device works while the host goes on; where it does not, each token is worth its own work and
    jumping always saves steps. `step_seconds`: see Executor."""

    def __init__(self, *, overlaps: bool, step_seconds: StepSeconds = unmeasured) -> None:
        self._overlaps = overlaps
        self._step_seconds = step_seconds

    def pays(self, saved: Mapping[int, int], num_rows: int) -> bool:
        """Whether the rows should jump, each saving so many steps, in a batch of `num_rows`."""
        if not saved:
            return False
        if not self._overlaps:
            return True
        steps = sum(saved.values())
        return self.may_enter(num_rows) and self.enter(steps, steps, num_rows)

    def may_enter(self, num_rows: int) -> bool:
        """A device that works beside the host takes forced text of so many rows at once, where it pays."""
        return num_rows < _MANY_ROWS

    def enter(self, saved: float, tokens: int, num_rows: int, *, beside: int = 0) -> bool:
        """Whether `tokens` more should enter a step of the rows, which saves so many of their steps. `beside`: other
        tokens that enter it anyway, besides one a row."""
        several = self._step_seconds(num_rows, num_rows + beside + tokens)
        if several is None:
            return False
        one = self._step_seconds(num_rows, num_rows + beside)
        dearer = several / one - 1 if one and several else _DEARER
        return saved >= dearer * num_rows
