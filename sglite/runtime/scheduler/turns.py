"""When the next step waits for the last one's result: a turn.

Overlapped, a step is queued before the tokens of the step before it are on the host. What those decide comes a step
later: of forced text the first token is drawn under its mask while the host learns of it, and drafts need the last
token.

    overlapped    token -> [first forced token is drawn] -> [the rest enters] -> ...
    in turn       token -> the host looks -> [the whole run, and drafts, enter] -> ...

A turn saves a row that step, and leaves the device idle while the host looks. Where forced text is expected behind the
draws of r of N rows and drafts give d tokens more, a turn does for all rows what 1 + (r + d) / N steps do overlapped:

    turns pay where   (1 + (r + d) / N) * seconds(N tokens) > seconds(N + drafts) + gap

The gap is the host's time between a result and the next launch. All of it is measured while it runs.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable

StepSeconds = Callable[[int, int], float | None]  # see Executor.step_seconds

_SURE = 0.03  # of the time that a turn must save: these are estimates
_UNKNOWN = 0.3  # of a step: gap and drafts, where steps are not measured
_GAPS = 15  # steps whose gaps are remembered; prompts among them take the host much longer


def unmeasured(num_rows: int, num_tokens: int) -> float | None:
    return 0.0


class Turns:
    def __init__(self, step_seconds: StepSeconds = unmeasured) -> None:
        self._step_seconds = step_seconds
        self._gaps: deque[float] = deque(maxlen=_GAPS)

    def took(self, gap: float) -> None:
        """A step's host work between a result and the next launch, in seconds."""
        self._gaps.append(gap)

    def pay(self, num_rows: int, *, runs: float, accepted: float = 0.0, drafts: int = 0) -> bool:
        """Whether the next step of so many rows should be a turn. `runs`: forced texts that are expected behind what is
        being drawn. `accepted`: tokens that `drafts` drafts are expected to give."""
        if not num_rows or not self._gaps or runs + accepted <= _SURE * num_rows:
            return False
        one = self._step_seconds(num_rows, num_rows)
        if not one:  # not measured
            return accepted > _UNKNOWN * num_rows
        several = self._step_seconds(num_rows, num_rows + drafts) if drafts else one
        if several is None:  # the device is not ready for drafts; it has heard that they are wanted
            several, accepted = one, 0.0
        saved = (runs + accepted) / num_rows
        return (1 + saved - _SURE) * one > (several or one) + statistics.median(self._gaps)
