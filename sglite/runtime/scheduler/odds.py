"""How likely forced text follows a row's next token, learned at each place of its grammar.

After the second digit of a date, or a value of an enum, it always does; within a long string hardly ever. A place is
the matcher's `state`, which all completions under a grammar share and which counts what came of it: `draws` and `runs`.
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


class RunOdds:
    def __init__(self) -> None:
        self.share = 0.0  # of all draws, lately

    @staticmethod
    def places(matchers: Iterable[Matcher | None]) -> list[Any]:
        """Where the first matchers stand; None for those that do not tell."""
        return [getattr(matcher, "state", None) for matcher in islice(matchers, _MANY)]

    def drew(self, places: Sequence[Any], ahead: Sequence[int]) -> None:
        """Tokens were drawn, the first ones at these places; `ahead`: of each, how many forced ones followed, or less
        than 0."""
        if not ahead:
            return
        runs = sum([run > 0 for run in ahead]) if any(ahead) else 0
        self.share += _MEMORY * (runs / len(ahead) - self.share)
        for place, run in zip(places, ahead, strict=False):
            if place is not None:
                place.draws += 1
                if run > 0:
                    place.runs += 1

    def expected(self, requests: Sequence[Request]) -> float:
        """Runs that may follow what these rows are drawing."""
        total = 0.0
        for request in requests[:_MANY]:
            matcher = request.matcher
            if matcher is None or request.num_ahead:  # what it draws is known
                continue
            place = getattr(matcher, "state", None)
            if place is None:
                total += self.share
            else:
                total += (place.runs + _PRIOR * self.share) / (place.draws + _PRIOR)
        return total * max(1.0, len(requests) / _MANY)
