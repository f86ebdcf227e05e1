"""Prompt lookup: what followed the last tokens when they stood in the text before is tried as a draft.

Drafts are verified in the step that computes them: each position draws with its own (seed, k), and a draft counts
where the draw is the same. So the text is the one without drafts, at any temperature, and grammars rule every draw.

A row with drafts needs its last token on the host, so it takes turns that are not overlapped. That pays only while
few rows run and drafts are accepted; `PromptLookup` watches both.
"""

from __future__ import annotations

import numpy as np

from sglite.runtime.batch import IntArray
from sglite.runtime.request import Request

_SHORTEST_MATCH = 2
_LONGEST_MATCH = 8  # of two places the one that agrees further back is tried, up to that many tokens
_MAX_WINDOW = 16384  # tokens back that are searched
_TRIAL = 24  # drafted tokens of a request after which its share of accepted ones counts
_WORTH = 0.15  # share of accepted drafts under which a request gets no more of them
_PATIENCE = 4  # turns without any draft after which the engine overlaps again
_REST = 16  # turns until it looks again, once

_NOTHING = np.empty(0, np.int32)


class PromptLookup:
    """`max_drafts` per row and step; `max_rows` running at which it still pays."""

    def __init__(self, *, max_drafts: int, max_rows: int) -> None:
        self.max_drafts = max_drafts
        self._max_rows = max_rows
        self._idle_turns = 0

    def tries(self, num_running: int) -> bool:
        """It may pay with so many rows."""
        return 0 < num_running <= self._max_rows

    def wants_turn(self, num_running: int) -> bool:
        """The next step should not be overlapped, so that rows may bring drafts."""
        if not self.tries(num_running):
            return False
        if self._idle_turns < _PATIENCE:
            return True
        self._idle_turns += 1
        if self._idle_turns > _PATIENCE + _REST:
            self._idle_turns = _PATIENCE - 1
        return False

    def turn_over(self, num_drafted: int) -> None:
        """A turn in which rows could bring drafts brought that many."""
        self._idle_turns = 0 if num_drafted else self._idle_turns + 1

    def drafts(self, request: Request, num_running: int) -> IntArray:
        """What may follow the request's tokens  # int32[<= max_drafts], legal under its grammar"""
        completion = request.completion
        room = min(self.max_drafts, request.limit - request.num_tokens - 1)
        if completion is None or room < 1 or not self.tries(num_running) or request.sampling.needs_counts:
            return _NOTHING
        tried, accepted = completion.draft_tokens, completion.accepted_draft_tokens
        if tried >= _TRIAL and accepted < _WORTH * tried:
            return _NOTHING
        found = look_up(request.tokens[-_MAX_WINDOW:], room)
        stops = [i for i, token_id in enumerate(found.tolist()) if token_id in completion.stop_ids]
        if stops:
            found = found[: stops[0]]
        if request.matcher is not None and len(found):
            legal = request.matcher.accept(found.tolist())
            request.matcher.rollback(legal)
            found = found[:legal]
        return found


def look_up(tokens: IntArray, room: int) -> IntArray:
    """Up to `room` tokens that followed an earlier place which ends like `tokens`: the one that agrees furthest back,
    of equals the latest. Empty where no two tokens agree."""
    if len(tokens) <= _SHORTEST_MATCH:
        return _NOTHING
    places = np.flatnonzero(tokens[:-1] == tokens[-1])
    best = _NOTHING
    for back in range(1, min(_LONGEST_MATCH, len(tokens) - 1)):
        places = places[places >= back]
        places = places[tokens[places - back] == tokens[-1 - back]]
        if not len(places):
            break
        best = places
    if not len(best):
        return _NOTHING
    start = int(best[-1]) + 1
    return tokens[start : start + room].copy()
