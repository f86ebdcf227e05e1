"""Prompt lookup: what followed the last tokens when they stood in the text before is tried as a draft.

Drafts are verified in the step that computes them: each position draws with its own (seed, k), and a draft counts
where the draw is the same. So the text is the one without drafts, at any temperature, and grammars rule every draw.

A row with drafts needs its last token on the host, so it takes turns that are not overlapped. Whether that pays is
known before it is done: what would have been tried is held against the tokens that came, without trying it.

    tokens    ... a b c d            a guess is made: e f g h
              ... a b c d e f g x    three of it would have been accepted

`PromptLookup.worth` is what a guess has given lately; only where that pays are guesses made drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from sglite.runtime.batch import IntArray
from sglite.runtime.request import Request
from sglite.runtime.scheduler.turns import StepSeconds, unmeasured

_SHORTEST_MATCH = 2
_LONGEST_MATCH = 8  # of two places the one that agrees further back is tried, up to that many tokens
_MAX_WINDOW = 16384  # tokens back that are searched
_MEMORY = 0.25  # weight of the newest guess in what guesses are worth
_WORTH = 0.75  # tokens that a guess must give for a row to draft

_NOTHING = np.empty(0, np.int32)


@dataclass(slots=True)
class _Guess:
    """The last guess of a request, about its tokens from `at` on, and what its guesses gave."""

    worth: float = 0.0
    count: int = 0
    at: int = -1  # no guess is open
    tokens: IntArray = field(default_factory=lambda: _NOTHING)

    def gave(self, tokens: int) -> None:
        self.count += 1
        self.worth += max(_MEMORY, 1 / self.count) * (tokens - self.worth)
        self.at = -1


class PromptLookup:
    """`max_drafts` per row and step; `max_rows` running at which it is tried. `step_seconds`: see Executor."""

    def __init__(self, *, max_drafts: int, max_rows: int, step_seconds: StepSeconds = unmeasured) -> None:
        self.max_drafts = max_drafts
        self._max_rows = max_rows
        self._step_seconds = step_seconds
        self._guesses: dict[Request, _Guess] = {}

    def tries(self, num_running: int) -> bool:
        """It may pay with so many rows."""
        return 0 < num_running <= self._max_rows

    def expected(self, running: Sequence[Request]) -> tuple[float, int]:
        """Tokens that drafts would give in the next step, and how many drafts those are."""
        if not self.tries(len(running)) or not self._guesses:
            return 0.0, 0
        worths = [guess.worth for r in running if (guess := self._guesses.get(r)) and guess.worth >= _WORTH]
        return sum(worths), sum(self._length(worth) for worth in worths)

    def may_run(self, num_rows: int, num_tokens: int) -> bool:
        """Whether the device is ready for a step of so many tokens."""
        return self._step_seconds(num_rows, num_tokens) is not None

    def watch(self, request: Request) -> None:
        """Look at the tokens that a request has got; make a guess where none is open."""
        guess = self._guesses.get(request)
        if guess is None:
            if len(self._guesses) > 4 * self._max_rows:
                self._guesses = {r: g for r, g in self._guesses.items() if not r.finished}
            guess = self._guesses[request] = _Guess()
        if guess.at >= 0:
            came = request.ids[guess.at : min(request.num_tokens, guess.at + len(guess.tokens))]
            wrong = np.flatnonzero(came != guess.tokens[: len(came)])
            right = int(wrong[0]) if len(wrong) else len(came)
            if right < len(guess.tokens) and not len(wrong):
                return
            guess.gave(right)
        guess.tokens = look_up(request.tokens[-_MAX_WINDOW:], self.max_drafts)
        if len(guess.tokens):
            guess.at = request.num_tokens
        else:
            guess.gave(0)

    def drafts(self, request: Request) -> IntArray:
        """What may follow the request's tokens, which `watch` has just seen  # int32[<= max_drafts], legal under its
        grammar"""
        completion, guess = request.completion, self._guesses.get(request)
        room = request.limit - request.num_tokens - 1
        if completion is None or guess is None or room < 1 or request.sampling.needs_counts or guess.worth < _WORTH:
            return _NOTHING
        if guess.at != request.num_tokens:  # an older one is open still: text that was not drafted has confirmed it
            guess.tokens = look_up(request.tokens[-_MAX_WINDOW:], self.max_drafts)
            guess.at = request.num_tokens if len(guess.tokens) else -1
        found = guess.tokens[: min(room, self._length(guess.worth))]
        stops = [i for i, token_id in enumerate(found.tolist()) if token_id in completion.stop_ids]
        if stops:
            found = found[: stops[0]]
        if request.matcher is not None and len(found):
            legal = request.matcher.accept(found.tolist())
            request.matcher.rollback(legal)
            found = found[:legal]
        return found

    def _length(self, worth: float) -> int:
        """Twice what is expected: who copies three tokens now may copy six soon."""
        return min(self.max_drafts, 2 + int(2 * worth))


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
