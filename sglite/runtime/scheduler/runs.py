"""Forced text whose moves its matcher knows, taken for all rows at once: behind the token that came, or as guessed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from sglite.runtime.batch import IntArray
from sglite.runtime.metrics import Metrics
from sglite.runtime.request import Request
from sglite.runtime.scheduler.rows import RowTable, Step


class Runs:
    """`emit` sends what is new of a request."""

    def __init__(self, table: RowTable, metrics: Metrics, emit: Callable[[Request], None]) -> None:
        self._table = table
        self._metrics = metrics
        self._emit = emit

    def enter(self, step: Step, tokens: IntArray, jumping: Iterable[int]) -> list[int]:
        """All rows at once whose token and the text that it forces only have to be stored, and sent where they stream.
        Returns their batch indices; the other ones that jump go the long way."""
        table = self._table
        taken: list[int] = []
        runs: list[tuple[int, ...]] = []
        for i in jumping:
            request = step.requests[i]
            run, row = _known_run(request), request.row
            if run is not None and table.length[row] + 1 + len(run.tokens) < table.limit[row]:
                self._take(request, run)
                taken.append(i)
                runs.append((int(tokens[i]), *run.tokens))
        if taken:
            requests = [step.requests[i] for i in taken]
            ahead = table.advance_by([request.row for request in requests], runs)
            self._metrics.completion_tokens += len(taken)
            for k in np.flatnonzero(ahead).tolist():
                requests[k].num_ahead += 1
            self._send(requests)
        return taken

    def settle_guesses(
        self, step: Step, tokens: IntArray, indices: Sequence[int], aheads: Sequence[int], following: Step
    ) -> list[int]:
        """The rows `indices` of a step gave their tokens, with so many forced ones ahead, and `following` has entered
        text behind those that the device knew alone. Stores what was guessed rightly, token and text, and returns the
        batch indices of these rows; of the others only their tokens are in flight, as without a guess."""
        right: list[int] = []
        lengths: list[int] = []
        wrong = dict(following.guesses)
        for i, ahead in zip(indices, aheads, strict=True):
            request = step.requests[i]
            guessed = following.guesses.get(request)
            if guessed is None or ahead != len(guessed) or request.finished:
                continue
            run = _known_run(request)
            if run is not None and run.tokens == guessed:
                self._take(request, run)
                right.append(i)
                lengths.append(len(guessed))
                del wrong[request]
        for request in wrong:
            if not request.finished and request.row >= 0:
                self._table.take_back(request)
                following.dropped.add(request)
        self._metrics.guessed_runs += len(following.guesses)
        self._metrics.wrong_guesses += len(wrong)
        if right:
            requests = [step.requests[i] for i in right]
            self._table.take_guesses([request.row for request in requests], tokens[right], lengths)
            self._metrics.completion_tokens += len(right)
            self._send(requests)
        return right

    def count_forced(self, request: Request, count: int) -> None:
        """Tokens that the grammar decides, entered at once or drawn next."""
        assert request.completion is not None
        request.completion.forced_tokens += count
        self._metrics.forced_tokens += count

    def _take(self, request: Request, run: Any) -> None:
        matcher: Any = request.matcher
        matcher.take_run(run)
        self.count_forced(request, len(run.tokens))
        self._metrics.completion_tokens += len(run.tokens)

    def _send(self, requests: list[Request]) -> None:
        for request in requests:
            completion = request.completion
            if completion is not None and completion.stream:
                self._table.settle(request)
                self._emit(request)


def _known_run(request: Request) -> Any:
    """Of a KnowsRuns, perhaps; asking isinstance takes longer than all the rest."""
    known = getattr(request.matcher, "known_run", None)
    return None if known is None else known()
