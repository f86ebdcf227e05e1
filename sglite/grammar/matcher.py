"""The interface between a grammar engine and the step loop: one compiled grammar per spec, one matcher per request.

    GrammarSpec  --compile-->  CompiledGrammar  --matcher()-->  Matcher
    (protocol)                 per spec, shared, immutable      per completion, one owner, mutable

Token ids are the model's. A bitmask row is int32[ceil(vocab_size / 32)], bit i%32 of word i//32 set
when token i may come next (the layout of xgrammar and llguidance). Stop ids are in the mask only where
the text so far is complete; once nothing else may follow, they are all that is left.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from sglite.protocol import Coverage, GrammarSpec

Bitmask = NDArray[np.int32]


class SharedMask:
    """A mask that many rows have in common, to be remembered by what it is applied on: equal is identical."""

    __slots__ = ("keeper", "place", "used", "words")

    def __init__(self, words: Bitmask) -> None:
        self.words = words  # int32[words], not to be written
        self.keeper: object = None  # who remembers it, for its own use:
        self.place = 0
        self.used = 0


class Matcher(Protocol):
    """The position of one completion within its grammar. Not thread-safe; never shared between requests."""

    def accept(self, token_ids: Sequence[int]) -> int:
        """Advance over the tokens; returns how many were legal. The state is that after the legal ones;
        an illegal token leaves the matcher usable. A stop id is legal where the text is complete."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` accepted tokens (stop ids included)."""
        ...

    def fork(self) -> Matcher: ...

    def fill(self, row: Bitmask) -> None:
        """Write the mask of the next token into `row`. Raises GrammarViolation where it would be empty."""
        ...

    def forced(self) -> list[int]:
        """The tokens that are certain from here, in canonical tokenisation, cut before the last boundary
        that could merge with free text; often empty. They are not accepted by this call."""
        ...

    @property
    def can_stop(self) -> bool:
        """The text so far is a complete value: a stop id is legal."""
        ...

    @property
    def finished(self) -> bool:
        """A stop id was accepted, or nothing but a stop id may follow."""
        ...


class CompiledGrammar(Protocol):
    @property
    def spec(self) -> GrammarSpec: ...

    @property
    def coverage(self) -> Coverage: ...

    @property
    def nbytes(self) -> int:
        """What it counts in the compiler's byte-capped cache."""
        ...

    def matcher(self, *, budget: int | None = None) -> Matcher:
        """At the start. With a `budget` the output is complete within that many tokens, stop id not counted; raises
        InvalidRequest where the shortest one is longer, or where that is not known for this kind of constraint."""
        ...

    def validate(self, text: str) -> str | None:
        """Why a complete output violates what the mask does not carry of the constraint (None: it does not)."""
        ...


class BatchFiller(Protocol):
    """Fills many rows in native threads without the interpreter lock."""

    def fill(self, matchers: Sequence[Matcher], rows: Sequence[int], bitmask: Bitmask) -> dict[int, Exception]:
        """Write matchers[i]'s mask into bitmask[rows[i]]  # bitmask: int32[num_rows, words].
        Returns the failures by i; the other rows are valid whatever happens to these."""
        ...


@runtime_checkable
class MaskSharer(Protocol):
    """What a batch filler may offer besides: masks that are remembered."""

    def known(self, matchers: Sequence[Matcher]) -> Sequence[SharedMask | None]:
        """For each the mask of its next token where a look tells it; None where `shared` has to be asked."""
        ...

    def shared(self, matchers: Sequence[Matcher]) -> tuple[list[SharedMask | None], dict[int, Exception]]:
        """For each the mask of its next token; None where it is not a shared one, and `fill` has to make it.
        With the failures by place."""
        ...


class Asked(Protocol):
    """A mask that is being made."""

    done: bool


@runtime_checkable
class MaskAsker(Protocol):
    """What a batch filler may offer besides: to make masks that take long while its caller goes on."""

    def begin(self, matchers: Sequence[Matcher], *, alone: bool = False) -> Mapping[int, Asked]:
        """The places of those whose mask takes an engine to tell. They are begun, by other threads, if they were not
        before; until they are done nobody may touch these matchers. `fill` and `shared` find what was made. `alone`:
        the caller has nothing else to do until they are there, and makes them itself where none is under way."""
        ...

    def wait(self, asked: Iterable[Asked], seconds: float) -> None:
        """Until all of them are done, or the time is over. What is done by then, these or others, is known from then
        on."""
        ...


class KnowsRuns(Protocol):
    """What a matcher may offer besides: forced text that it accepts without looking at it again."""

    def known_run(self) -> Any:
        """All of `forced`, in the result's `tokens`, a tuple; None where it has to be found and accepted token by
        token, or where the output is over behind it."""
        ...

    def take_run(self, run: Any) -> None:
        """Accept what `known_run` gave, at the same place."""
        ...


REFUSED = -2  # the token is not legal
OVER = -1  # a stop id was accepted, or nothing but one may follow


@runtime_checkable
class BatchAdvancer(Protocol):
    """What a batch filler may offer besides: accept one token for each of many matchers in native threads."""

    def advance(self, matchers: Sequence[Matcher], token_ids: Sequence[int]) -> list[int]:
        """matchers[i].accept((token_ids[i],)) for each i, in any order. For each REFUSED, OVER or how many tokens are
        forced from there (`forced`). A matcher that refuses need not be usable afterwards: its request ends."""
        ...
