"""When forced text enters as new tokens of one step, and when it is drawn token by token under its mask.

The text is the same either way. A run of n tokens that enters at once saves its row n - 1 steps (n - 2 where a draw is
under way already), and makes that step one of several tokens a row, which is dearer for all its rows:

    few rows     such a step costs about an eighth more than a decode step: it pays from that much saved work on
    many rows    a step's time grows with its tokens, forced or drawn: nothing is saved
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

_FEW_ROWS = 2
_MANY_ROWS = 96  # H200: from there on the projections are bound by computing, not by reading weights
_DEARER = 0.125


class JumpPolicy:
    """`overlaps`: the device works while the host goes on; where it does not, each token is worth its own work and
    jumping always saves steps. `ready`: the device does not have to prepare for such steps, which would hold all rows
    up; a single stream is not worth the question."""

    def __init__(self, *, overlaps: bool, ready: Callable[[], bool] = lambda: True) -> None:
        self._overlaps = overlaps
        self._ready = ready

    def pays(self, saved: Mapping[int, int], num_rows: int) -> bool:
        """Whether the rows should jump, each saving so many steps, in a batch of `num_rows`."""
        if not saved:
            return False
        if not self._overlaps:
            return True
        if num_rows >= _MANY_ROWS or sum(saved.values()) < _DEARER * num_rows:
            return False
        return num_rows <= _FEW_ROWS or self._ready()
