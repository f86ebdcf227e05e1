"""A grammar that begins after a marker: a reasoning model thinks freely, then answers under its constraint."""

from __future__ import annotations

from collections.abc import Sequence

from sglite.errors import InvalidRequest
from sglite.grammar.budget import BudgetMatcher
from sglite.grammar.matcher import Bitmask, Matcher
from sglite.runtime.scheduler.masks import allow, forbid


class DelayedMatcher:
    """Everything but a stop id is legal until the marker's ids were generated; then `inner` rules (None: nobody).

    `budget`: after that many tokens without it the marker is forced; before that where `inner` has to close within a
    number of tokens, of which those here are some. A layer in the sense of the batch filler: once the marker is there,
    the mask is that of `below`.
    """

    def __init__(
        self, inner: Matcher | None, marker: Sequence[int], *, budget: int | None, stop_ids: Sequence[int]
    ) -> None:
        """Raises InvalidRequest where an inner budget does not hold the marker and the shortest answer."""
        assert marker, "a marker of no tokens is no delay"
        self._inner = inner
        self._marker = tuple(marker)
        self._budget = budget
        if isinstance(inner, BudgetMatcher):
            spare = inner.spare - len(marker)
            if spare < 0:
                raise InvalidRequest(
                    f"the shortest answer and the end of thinking take {-spare} tokens more than max_tokens",
                    param="max_tokens",
                )
            self._budget = spare if budget is None else min(budget, spare)
        self._stop_ids = tuple(stop_ids)
        self._free: list[int] = []  # up to and with the marker
        self._num_inner = 0
        self._begun = False

    @property
    def num_free(self) -> int:
        """Tokens up to and with the marker; all so far where it has not come."""
        return len(self._free)

    @property
    def begun(self) -> bool:
        return self._begun

    @property
    def below(self) -> Matcher | None:
        return self._inner if self._begun else None

    def finish_fill(self, row: Bitmask) -> None:
        """The mask of `below` stands as it is."""

    def accept(self, token_ids: Sequence[int]) -> int:
        for done, token_id in enumerate(token_ids):
            if self._begun:
                if self._inner is not None and not self._inner.accept((token_id,)):
                    return done
                self._num_inner += 1
                continue
            if token_id in self._stop_ids or (self._due is not None and token_id != self._due):
                return done
            self._free.append(token_id)
            if tuple(self._free[-len(self._marker) :]) == self._marker:
                self._begin(len(self._free))
        return len(token_ids)

    def _begin(self, num_free: int) -> None:
        self._begun = True
        if isinstance(self._inner, BudgetMatcher):
            self._inner.spend(num_free)

    @property
    def is_budgeted(self) -> bool:
        """`inner` counts tokens."""
        return isinstance(self._inner, BudgetMatcher)

    def rollback(self, num_tokens: int) -> None:
        inner = min(num_tokens, self._num_inner)
        if inner and self._inner is not None:
            self._inner.rollback(inner)
        self._num_inner -= inner
        free = num_tokens - inner
        assert free <= len(self._free), "rollback past the start"
        if free:
            if self._begun and isinstance(self._inner, BudgetMatcher):
                self._inner.spend(-len(self._free))
            del self._free[-free:]
            self._begun = False

    def fork(self) -> DelayedMatcher:
        inner = None if self._inner is None else self._inner.fork()
        twin = object.__new__(DelayedMatcher)
        twin._inner, twin._marker, twin._budget, twin._stop_ids = inner, self._marker, self._budget, self._stop_ids
        twin._free, twin._num_inner, twin._begun = list(self._free), self._num_inner, self._begun
        return twin

    def fill(self, row: Bitmask) -> None:
        if self._begun and self._inner is not None:
            self._inner.fill(row)
        elif self._begun:
            row.fill(-1)
        elif self._due is not None:
            row.fill(0)
            allow(row, (self._due,))
        else:
            row.fill(-1)
            forbid(row, self._stop_ids)

    def forced(self) -> list[int]:
        inner = [] if self._inner is None else self._inner.forced()
        if self._begun:
            return inner
        return [] if self._due is None else [*self._marker[self._progress() :], *inner]

    @property
    def can_stop(self) -> bool:
        return self._begun and (self._inner is None or self._inner.can_stop)

    @property
    def finished(self) -> bool:
        return self._begun and self._inner is not None and self._inner.finished

    @property
    def _due(self) -> int | None:
        """The marker's next id, once the budget is spent."""
        if self._begun or self._budget is None or len(self._free) < self._budget:
            return None
        return self._marker[self._progress()]

    def _progress(self) -> int:
        """Ids of the marker that stand at the end already."""
        for n in range(min(len(self._marker) - 1, len(self._free)), 0, -1):
            if tuple(self._free[-n:]) == self._marker[:n]:
                return n
        return 0
