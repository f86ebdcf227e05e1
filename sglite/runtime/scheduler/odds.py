"""How likely forced text follows a row's next token, learned at each place of its grammar.

After the second digit of a date, or a value of an enum, it always does; within a long string hardly ever. A place is
what the grammar remembers where a matcher stands (`state.said`), which all completions under a grammar share, wherever
in it a token meets the same. It counts what came of it: `draws`, those that forced text followed (`runs`), and how
often each of a few texts did (`followed`; the one that did most is `likely`, with `hits`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from sglite.grammar.matcher import Matcher
from sglite.runtime.request import Request

_PRIOR = 2.0  # draws that the share of all places weighs at one
_MEMORY = 0.05  # weight of the newest step in that share
_MANY = 64  # rows of which no more are looked at: so many are like all
_SURE = 0.3  # of the draws: by how much a likely text must have come more often than none
_MOST_TEXTS = 8  # that are counted at a place


# (index of a row, the text that probably follows what it is drawing, how often it did, how often none did)
Likely = tuple[int, tuple[int, ...], float, float]


class RunOdds:
    """`guesses`: likely texts enter before the token in front of them is known."""

    def __init__(self, *, guesses: bool = False) -> None:
        self.share = 0.0  # of all draws, lately
        self.likely: list[Likely] = []  # of the rows that were looked at last
        self._entered = 1.0  # share of such lists that entered, lately
        self._guesses = guesses

    @staticmethod
    def places(matchers: Iterable[Matcher | None]) -> list[Any]:
        """Where the first matchers stand; None for those that do not tell."""
        states = [getattr(matcher, "state", None) for matcher in islice(matchers, _MANY)]
        return [None if state is None else state.said for state in states]

    def drew(self, places: Sequence[Any], ahead: Sequence[int], requests: Sequence[Request] = ()) -> None:
        """Tokens were drawn, the first ones at these places; `ahead`: of each, how many forced ones followed, or less
        than 0. `requests`: whose matchers have taken them."""
        if not ahead:
            return
        runs = sum([run > 0 for run in ahead]) if any(ahead) else 0
        self.share += _MEMORY * (runs / len(ahead) - self.share)
        for place, run, request in zip(places, ahead, requests, strict=False):
            if place is None:
                continue
            if run > 0:
                place.runs += 1
                if self._guesses:
                    _saw(place, request.matcher)
            elif not run:
                state: Any = request.matcher.state  # type: ignore[union-attr]
                if state is not None and state.said.ahead is None:  # nobody knows yet what is forced there
                    continue
            place.draws += 1

    def guessed(self, *, entered: bool) -> None:
        """Whether what was `likely` entered: it may not pay, or the device may not be ready for so many tokens."""
        self._entered += _MEMORY * (entered - self._entered)

    def expected(self, requests: Sequence[Request]) -> float:
        """Runs that may follow what these rows are drawing, and that nobody guesses (`likely`). None where some of the
        rows have no grammar: these would wait for them, too."""
        total, share, prior, free = 0.0, self.share, _PRIOR * self.share, False
        likely: list[Likely] = []
        for i, request in enumerate(requests[:_MANY]):
            matcher = request.matcher
            if matcher is None:
                free = True
                continue
            if request.num_ahead:  # what it draws is known
                continue
            state = getattr(matcher, "state", None)
            if state is None:
                total += share
                continue
            place = state.said
            draws = place.draws
            total += (place.runs + prior) / (draws + _PRIOR)
            hits = place.hits
            if hits and hits - (lost := draws - place.runs) > _SURE * draws:
                total -= self._entered * (hits - lost) / draws
                likely.append((i, place.likely, hits / draws, lost / draws))
        self.likely = likely
        return 0.0 if free else max(0.0, total) * max(1.0, len(requests) / _MANY)


def _saw(place: Any, matcher: Any) -> None:
    """A run follows, in front of which the matcher stands."""
    known = getattr(matcher, "known_run", None)
    run = None if known is None else known()
    if run is None:
        return
    followed = place.followed
    if followed is None:
        followed = place.followed = {}
    count = followed.get(run.tokens, 0) + 1
    if count > 1 or len(followed) < _MOST_TEXTS:
        followed[run.tokens] = count
        if count > place.hits:
            place.likely, place.hits = run.tokens, count
