"""Matchers around a matcher: rules that are kept beside the grammar."""

from __future__ import annotations

from collections.abc import Sequence

from sglite.errors import GrammarViolation
from sglite.grammar import bitmask
from sglite.grammar.matcher import Bitmask, Matcher
from sglite.grammar.schema.types import ResidualTracker
from sglite.grammar.vocab import Vocab


class WithResidual:
    """A matcher whose tokens must also keep the rules of a `ResidualTracker` (keys never twice, uniqueItems)."""

    __slots__ = ("_lengths", "_tracker", "_vocab", "below")

    def __init__(self, below: Matcher, tracker: ResidualTracker, vocab: Vocab) -> None:
        self.below: Matcher = below
        self._tracker = tracker
        self._vocab = vocab
        self._lengths: list[int] = []  # bytes that each accepted token showed to the tracker

    def accept(self, token_ids: Sequence[int]) -> int:
        for done, token_id in enumerate(token_ids):
            if self.below.accept([token_id]) == 0:
                return done
            data = b"" if token_id in self._vocab.stop_ids else self._vocab.tokens[token_id]
            if data and not self._tracker.allows(data):
                self.below.rollback(1)
                return done
            if data:
                self._tracker.accept(data)
            self._lengths.append(len(data))
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        assert 0 <= num_tokens <= len(self._lengths), "rollback past the start"
        if num_tokens == 0:
            return
        self.below.rollback(num_tokens)
        dropped = sum(self._lengths[-num_tokens:])
        del self._lengths[-num_tokens:]
        if dropped:
            self._tracker.rollback(dropped)

    def fork(self) -> WithResidual:
        twin = WithResidual(self.below.fork(), self._tracker.fork(), self._vocab)
        twin._lengths = list(self._lengths)
        return twin

    def fill(self, row: Bitmask) -> None:
        self.below.fill(row)
        self.finish_fill(row)

    def finish_fill(self, row: Bitmask) -> None:
        suspects = bitmask.ids(row & self._vocab.holding(self._tracker.watch))
        tokens = self._vocab.tokens
        wrong = [int(i) for i in suspects if not self._tracker.allows(tokens[i])]
        if wrong:
            bitmask.clear(row, wrong)
            if not row.any():
                raise GrammarViolation("every token that the grammar allows here breaks another rule of the schema")

    def forced(self) -> list[int]:
        tokens = self.below.forced()
        taken = self.accept(tokens)
        self.rollback(taken)
        return tokens[:taken]

    @property
    def can_stop(self) -> bool:
        return self.below.can_stop

    @property
    def finished(self) -> bool:
        return self.below.finished
