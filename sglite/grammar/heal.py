"""Healing the boundary between a prompt's text and what is generated after it.

Where the author's text ended inside what the model knows as one token ("http" + "s"), the last token of the prompt is
dropped and the next tokens must spell its bytes again, but may go on beyond them:

    prefix bytes        |h t t p|
    a token may be      |h t|            inside: the rest of the prefix is still owed
                        |h t t p|        the prefix exactly: what follows is ruled by the inner matcher
                        |h t t p s : /|  beyond: its rest must be legal for the inner matcher

The emitted text begins with the prefix; whoever shows it skips that many bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglite.grammar import bitmask
from sglite.grammar.matcher import Bitmask, Matcher
from sglite.grammar.vocab import Vocab

MAX_KEPT = 256  # prefixes whose continuations are kept, for each vocabulary
MAX_PROBES = 2_000  # rests that are tried on the inner matcher for one mask; a healed mask may be that much narrower


def heal_token(token_id: int, inner: Matcher | None, vocab: Vocab) -> HealedMatcher | None:
    """A matcher that must continue the bytes of `token_id`; None where no other token begins with them.

    Where `inner` has to close within a number of tokens (`is_budgeted`) one token spells the prefix again, and what it
    goes beyond it is a token that the inner mask allows: so nothing is spent that `inner` does not know of.
    """
    prefix = vocab.tokens[token_id] if 0 <= token_id < vocab.size else b""
    if not prefix or not vocab.reaches_over(prefix):
        return None
    return HealedMatcher(prefix, inner, vocab, at_once=getattr(inner, "is_budgeted", False))


def heal_prefix(token_ids: Sequence[int], vocab: Vocab) -> tuple[list[int], bytes] | None:
    """The ids that stay and the bytes to continue; None where there is nothing to heal."""
    if not token_ids or heal_token(token_ids[-1], None, vocab) is None:
        return None
    return list(token_ids[:-1]), vocab.tokens[token_ids[-1]]


@dataclass(frozen=True, slots=True)
class _Beyond:
    """Tokens that begin with a prefix and go on."""

    token_ids: NDArray[np.int64]
    rest_ids: NDArray[np.int64]  # the token that is exactly the rest, or -1
    rests: tuple[bytes, ...]
    first_bytes: NDArray[np.uint8]  # of each rest
    free_mask: Bitmask  # of the prefix and all of these


class HealedMatcher:
    """See `sglite.grammar.matcher.Matcher`. `inner` None: free text after the prefix."""

    def __init__(self, prefix: bytes, inner: Matcher | None, vocab: Vocab, *, at_once: bool = False) -> None:
        """`at_once`: see `heal_token`."""
        self.prefix = prefix
        self._at_once = at_once
        self._inner = inner
        self._vocab = vocab
        self._at = 0  # bytes of the prefix that are there already
        self._steps: list[tuple[int, int]] = []  # per token: bytes of the prefix, tokens given to inner

    @property
    def below(self) -> Matcher | None:
        """For the batch filler: past the prefix this mask is the inner one."""
        return self._inner if self._healed else None

    @property
    def unwrapped(self) -> Matcher | None:
        """Past the prefix, the matcher that rules alone from here on (None: there is none, or it is not so far)."""
        return self.below

    def finish_fill(self, row: Bitmask) -> None:
        """The mask of `below` stands as it is."""

    def accept(self, token_ids: Sequence[int]) -> int:
        for done, token_id in enumerate(token_ids):
            step = self._step(token_id)
            if step is None:
                return done
            self._at += step[0]
            self._steps.append(step)
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        assert 0 <= num_tokens <= len(self._steps), "rollback past the start"
        if num_tokens == 0:
            return
        undone = self._steps[-num_tokens:]
        del self._steps[-num_tokens:]
        self._at -= sum(num_bytes for num_bytes, _ in undone)
        inner_tokens = sum(num for _, num in undone)
        if self._inner is not None and inner_tokens:
            self._inner.rollback(inner_tokens)

    def fork(self) -> HealedMatcher:
        inner = None if self._inner is None else self._inner.fork()
        twin = HealedMatcher(self.prefix, inner, self._vocab, at_once=self._at_once)
        twin._at, twin._steps = self._at, list(self._steps)
        return twin

    def fill(self, row: Bitmask) -> None:
        if not self._healed:
            self._fill_prefix(row)
        elif self._inner is None:
            row.fill(-1)
        else:
            self._inner.fill(row)

    def forced(self) -> list[int]:
        return self._inner.forced() if self._healed and self._inner is not None else []

    @property
    def can_stop(self) -> bool:
        return self._healed and (self._inner is None or self._inner.can_stop)

    @property
    def finished(self) -> bool:
        return self._healed and self._inner is not None and self._inner.finished

    @property
    def _healed(self) -> bool:
        return self._at == len(self.prefix)

    def _step(self, token_id: int) -> tuple[int, int] | None:
        """What accepting the token means; the inner matcher has moved where it is legal."""
        if self._healed:
            if self._inner is None:
                return (0, 0)
            return (0, 1) if self._inner.accept([token_id]) else None
        text = self._vocab.tokens[token_id] if 0 <= token_id < self._vocab.size else b""
        owed = self.prefix[self._at :]
        if text and owed.startswith(text) and (text == owed or not self._at_once):
            return (len(text), 0)
        if not text.startswith(owed):
            return None
        if self._inner is None:
            return (len(owed), 0)
        if self._at_once:
            return self._step_at_once(text[len(owed) :], self._inner)
        rest = self._vocab.spell(text[len(owed) :])
        if rest is None:
            return None
        taken = self._inner.accept(rest)
        if taken < len(rest):
            self._inner.rollback(taken)
            return None
        return (len(owed), len(rest))

    def _step_at_once(self, rest: bytes, inner: Matcher) -> tuple[int, int] | None:
        row = bitmask.empty(self._vocab.size)
        inner.fill(row)
        rest_id = (*self._vocab.with_bytes(rest), -1)[0]
        if rest_id < 0 or not bitmask.contains(row, rest_id) or not inner.accept((rest_id,)):
            return None
        return (len(self.prefix), 1)

    def _fill_prefix(self, row: Bitmask) -> None:
        owed = self.prefix[self._at :]
        beyond = self._beyond(owed)
        if self._inner is None:
            row[:] = beyond.free_mask
            return
        allowed = beyond.token_ids[self._legal_rests(beyond, self._inner)]
        row[:] = bitmask.of([*self._within(owed), *allowed.tolist()], self._vocab.size)

    def _within(self, owed: bytes) -> list[int]:
        """Tokens that spell some of what is owed, or all of it."""
        return [*([] if self._at_once else self._vocab.inside(owed)), *self._vocab.with_bytes(owed)]

    def _beyond(self, owed: bytes) -> _Beyond:
        """Kept: a blank is what tens of thousands of tokens begin with, and prompts end in the same few tokens."""
        kept, key = self._vocab.kept, ("beyond", owed, self._at_once)
        found: _Beyond | None = kept.get(key)
        if found is None:
            if len(kept) > MAX_KEPT:
                kept.clear()
            found = kept[key] = self._find_beyond(owed)
        return found

    def _find_beyond(self, owed: bytes) -> _Beyond:
        token_ids = np.array([i for i in self._vocab.extending(owed) if self._vocab.tokens[i] != owed], dtype=np.int64)
        rests = tuple(self._vocab.tokens[i][len(owed) :] for i in token_ids)
        rest_ids = np.array([(*self._vocab.with_bytes(r), -1)[0] for r in rests], dtype=np.int64)
        first_bytes = np.array([rest[0] for rest in rests], dtype=np.uint8)
        mask = bitmask.of([*self._within(owed), *token_ids.tolist()], self._vocab.size)
        return _Beyond(token_ids, rest_ids, rests, first_bytes, mask)

    def _legal_rests(self, beyond: _Beyond, inner: Matcher) -> NDArray[np.bool_]:
        """Which rests the inner matcher takes: by its mask where the rest is a token, else by trying it.

        At a forced place the mask names one canonical token only, so there every rest is tried.
        """
        row = bitmask.empty(self._vocab.size)
        inner.fill(row)
        forced = inner.forced()
        flags = np.unpackbits(row.view(np.uint8), bitorder="little").astype(bool)
        known = (beyond.rest_ids >= 0) & (not forced)
        legal = np.zeros(len(beyond.rests), dtype=bool)
        legal[known] = flags[beyond.rest_ids[known]]
        if self._at_once:
            named = beyond.rest_ids >= 0
            legal[named] = flags[beyond.rest_ids[named]]
            return legal
        unknown = np.flatnonzero(~known)
        if len(unknown):
            first = {
                self._vocab.tokens[i][0] for i in (forced[:1] or bitmask.ids(row).tolist()) if self._vocab.tokens[i]
            }
            unknown = unknown[np.isin(beyond.first_bytes[unknown], list(first))]
        for i in unknown[:MAX_PROBES].tolist():
            tokens = self._vocab.spell(beyond.rests[i])
            if tokens is not None:
                taken = inner.accept(tokens)
                inner.rollback(taken)
                legal[i] = taken == len(tokens)
        return legal
