"""Forced text that enters before the token that it follows is known.

Overlapped, a step is queued while the draw before it is still on the device, and what the grammar forces behind that
draw is known a step later. But at many places the same text follows whatever is drawn: behind the last digit of a date
comes `","due_date":"`. There the row enters it at once, behind the token that only the device knows:

    overlapped    token -> [token; the first forced one is drawn] -> [forced text; the next one is drawn]
    guessed       token -> [token, forced text; the next one is drawn]

The host learns the token while that forward runs, before the step's masks are told. Where the guess was right, the row
has gained a step. Where it was wrong, what the step computed of the row counts for nothing: the next one computes its
token again, with what really follows, and draws with the same noise. That is a step lost if nothing was forced, and
none if another text was. The text is the same in all cases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sglite.runtime.request import Request
from sglite.runtime.scheduler.jumps import JumpPolicy
from sglite.runtime.scheduler.odds import RunOdds
from sglite.runtime.scheduler.rows import RowTable, RowView

Guesses = Mapping[Request, tuple[int, ...]]
NO_GUESSES: Guesses = {}


class RunGuesser:
    """`odds` has looked at the rows in this turn. `max_tokens`: of a step."""

    def __init__(self, table: RowTable, odds: RunOdds, jumps: JumpPolicy, *, max_tokens: int) -> None:
        self._table = table
        self._odds = odds
        self._jumps = jumps
        self._max_tokens = max_tokens

    def guess(self, requests: Sequence[Request], view: RowView) -> Guesses:
        """Enter what is likely forced behind the tokens in flight, where that pays. `view`: of these rows; it is old
        where there are guesses."""
        likely = self._odds.likely
        if not likely or not self._jumps.may_enter(len(requests)):
            return NO_GUESSES
        ready, lengths = view.draws_in_flight(), view.reachable.tolist()
        found: dict[Request, tuple[int, ...]] = {}
        expected, tokens = 0.0, 0
        for i, run, right, lost in likely:
            if i < len(ready) and ready[i] and _may(requests[i], lengths[i] + len(run)):
                found[requests[i]] = run
                tokens += len(run)
                expected += right * len(run) - lost
        if not found:
            return NO_GUESSES
        num_rows = len(requests)
        beside = max(0, int(view.wanted().sum()) - num_rows)
        entered = num_rows + beside + tokens <= self._max_tokens and self._jumps.enter(
            expected, tokens, num_rows, beside=beside, free=view.has_free
        )
        self._odds.guessed(entered=entered)
        if not entered:
            return NO_GUESSES
        for request, run in found.items():
            self._table.guess(request, run)
        return found

    def take_back(self, guesses: Guesses) -> None:
        """Of a step that is not built."""
        for request in guesses:
            if request.row >= 0 and not request.finished:
                self._table.take_back(request)


def _may(request: Request, length: int) -> bool:
    """`length`: of all its tokens then. Its draw may be dropped, and text may enter at once."""
    completion = request.completion
    wants = completion is not None and completion.jump_forward and not request.sampling.needs_counts
    return wants and length + 1 < request.limit
