"""When forced text enters as new tokens of one step, and when it is drawn token by token under its mask.

The text is the same either way. A run of forced tokens that enters at once saves its row steps and makes one step of
all rows dearer. With N rows, of which some save s steps in all, and what the device takes for a step of so many tokens,

    jump     N + s tokens in the time of a step of N + s tokens
    draw     N tokens     in the time of a step of N

so jumping pays where s / N > seconds(N + s) / seconds(N) - 1: nearly always where a step reads weights most of its
time, and never where its time grows with its tokens. Both are measured by the device while it runs.

The second question is when a run is known. Overlapped, a step is queued before the token drawn last is on the host: it
draws the first forced token under its mask, and only the step after that takes the rest.

    overlapped    token -> [first forced token is drawn] -> [the rest enters] -> ...
    in turn       token -> the host looks -> [the whole run enters] -> ...

A turn saves each run one step of its row and leaves the device idle while the host looks. With a share p of all draws
that a run follows, a row needs 1 + p steps overlapped for each that it needs in turn, so turns pay where
(1 + p) * seconds(N) > seconds(N) + gap, the gap being the host's time between a result and the next launch.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping

_DEARER = 0.125  # by how much a step of several tokens a row is dearer, until it was measured
_SURE = 0.03  # share of the time that a turn must save: it is an estimate
_MEMORY = 0.05  # weight of the newest step in what is remembered of steps
_GAPS = 15  # steps whose gaps are remembered; prompts among them take the host much longer


def _unknown(num_rows: int, num_tokens: int) -> float | None:
    return 0.0


class JumpPolicy:
    """`overlaps`: the device works while the host goes on; where it does not, each token is worth its own work and
    jumping always saves steps. `step_seconds`: see Executor."""

    def __init__(
        self, *, overlaps: bool, step_seconds: Callable[[int, int], float | None] = _unknown, turns: bool = True
    ) -> None:
        self._overlaps = overlaps
        self._turns = overlaps and turns
        self._step_seconds = step_seconds
        self._runs = 0.0  # share of the draws that forced text follows
        self._gaps: deque[float] = deque(maxlen=_GAPS)  # seconds of the host between a result and the next launch

    def pays(self, saved: Mapping[int, int], num_rows: int) -> bool:
        """Whether the rows should jump, each saving so many steps, in a batch of `num_rows`."""
        if not saved:
            return False
        if not self._overlaps:
            return True
        steps = sum(saved.values())
        several = self._step_seconds(num_rows, num_rows + steps)
        if several is None:
            return False
        one = self._step_seconds(num_rows, num_rows)
        dearer = several / one - 1 if one and several else _DEARER
        return steps >= dearer * num_rows

    # -- turns

    def drew(self, num_rows: int, num_runs: int) -> None:
        """In a step so many rows drew a token, of which forced text follows so many."""
        if num_rows:
            self._runs += _MEMORY * (num_runs / num_rows - self._runs)

    def took(self, gap: float) -> None:
        """A step's host work between a result and the next launch, in seconds."""
        self._gaps.append(gap)

    def wants_turn(self, num_rows: int) -> bool:
        """The next step should wait for the last one's result."""
        if not self._turns or not num_rows or self._runs <= _SURE or not self._gaps:
            return False
        seconds = self._step_seconds(num_rows, num_rows)
        return bool(seconds) and (self._runs - _SURE) * seconds > statistics.median(self._gaps)
