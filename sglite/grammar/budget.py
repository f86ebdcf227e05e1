"""Closing in time: a value that is complete when its tokens run out.

With r tokens left and a way of n tokens to the end, r - n are spare. What one more token can cost is bounded (`Reach`):

    spare > several openings   everything is legal
    spare > one opening        tokens that open several values at once are not
    spare > a string's rest    in a string, its text goes on; otherwise the way to the end
    else                       the way to the end, token by token

A value may so be closed a little earlier than it had to be, never too late.
"""

from __future__ import annotations

from collections.abc import Sequence

from sglite.errors import GrammarViolation, InvalidRequest
from sglite.grammar import bitmask
from sglite.grammar.closing import JsonState, closing_tokens, completes
from sglite.grammar.matcher import Bitmask, Matcher
from sglite.grammar.reach import Reach
from sglite.grammar.vocab import Vocab

_MARGIN = 8  # tokens: what bounds in bytes may miss (an escape or a character begun)
_OPENINGS = 16  # values that one token may open


class BudgetMatcher:
    """See `sglite.grammar.matcher.Matcher`. A layer for the batch filler."""

    is_budgeted = True  # what is around it must spend tokens by `spend` alone

    def __init__(self, below: Matcher, budget: int, vocab: Vocab, reach: Reach) -> None:
        """Raises InvalidRequest where the shortest way found takes more than `budget` tokens."""
        self.below: Matcher = below
        self._budget = budget  # what is left of it before the first token of this matcher
        self._vocab = vocab
        self._reach = reach
        self._states = [JsonState()]  # after each accepted token
        self._way: list[int] = self._search()
        self._way_is_known = True  # for this very position; else it is a guess from an earlier one
        if len(self._way) > budget:
            raise InvalidRequest(
                f"the shortest answer takes {len(self._way)} tokens and max_tokens is {budget}; raise max_tokens",
                param="max_tokens",
            )

    def accept(self, token_ids: Sequence[int]) -> int:
        for done, token_id in enumerate(token_ids):
            if self.below.accept([token_id]) == 0:
                return done
            data = b"" if token_id in self._vocab.stop_ids else self._vocab.tokens[token_id]
            self._states.append(self._states[-1].after(data))
            if self._way[:1] == [token_id]:
                self._way = self._way[1:]
            else:
                self._way_is_known = False
        return len(token_ids)

    def spend(self, num_tokens: int) -> None:
        """Tokens went elsewhere (a thinking phase), or came back where `num_tokens` is negative."""
        self._budget -= num_tokens

    @property
    def spare(self) -> int:
        """How many tokens may go elsewhere from here, so that the shortest way to the end still fits."""
        return self._spare()

    def rollback(self, num_tokens: int) -> None:
        assert 0 <= num_tokens < len(self._states), "rollback past the start"
        if num_tokens:
            self.below.rollback(num_tokens)
            del self._states[-num_tokens:]
            self._way_is_known = False

    def fork(self) -> BudgetMatcher:
        twin = object.__new__(BudgetMatcher)
        twin.below = self.below.fork()
        twin._budget, twin._vocab, twin._reach = self._budget, self._vocab, self._reach
        twin._states = list(self._states)
        twin._way, twin._way_is_known = list(self._way), self._way_is_known
        return twin

    def fill(self, row: Bitmask) -> None:
        self.below.fill(row)
        self.finish_fill(row)

    def finish_fill(self, row: Bitmask) -> None:
        if self.below.finished or self._is_far:
            return
        spare = self._spare()
        if spare > _OPENINGS * (self._reach.opening + 1):
            return
        way = bitmask.of(self._way[:1], self._vocab.size) if self._way else self._vocab.stop_mask
        if spare > self._reach.opening + _MARGIN:
            row[:] = (row & ~self._vocab.openers_mask) | way
        elif self._may_go_on(spare):
            row[:] = (row & self._vocab.plain_mask) | way
        else:
            row[:] = way

    def forced(self) -> list[int]:
        if not self.below.finished and not self._is_far:
            spare = self._spare()
            if spare <= self._reach.opening + _MARGIN and not self._may_go_on(spare):
                return list(self._way)
        return self.below.forced()[: max(0, self._left)]

    @property
    def can_stop(self) -> bool:
        return self.below.can_stop

    @property
    def finished(self) -> bool:
        return self.below.finished

    @property
    def _left(self) -> int:
        return self._budget - (len(self._states) - 1)

    @property
    def _is_far(self) -> bool:
        """No way to the end can be so long that it matters yet: no need to look for one."""
        values = max(self._states[-1].depth, 0) + 1 + _OPENINGS
        return self._left > (values + 1) * (self._reach.opening + 1) + _MARGIN

    def _may_go_on(self, spare: int) -> bool:
        """In a string that could be closed here, and with tokens to spare for a little more of it."""
        closes = bool(self._way) and self._vocab.tokens[self._way[0]].startswith(b'"')
        return self._states[-1].in_string and closes and spare > self._reach.inside + _MARGIN

    def _spare(self) -> int:
        if not self._way_is_known:
            if not completes(self.below, self._way):
                self._way = self._search()
            self._way_is_known = True
        spare = self._left - len(self._way)
        if spare < 0:
            raise GrammarViolation("the value can no longer be closed within its tokens")
        return spare

    def _search(self) -> list[int]:
        way = closing_tokens(self.below, self._vocab, self._states[-1])
        if way is None:
            raise InvalidRequest("no short complete answer was found; close_on_budget cannot be used here")
        return way
