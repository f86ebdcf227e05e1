"""Masks of many rows at once, in native threads without the interpreter lock.

Steps of one call: peel the layers off each matcher down to the native one, group the native ones by engine,
let each engine fill its group in parallel, then let the layers narrow their rows, innermost first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, runtime_checkable

import llguidance
import numpy as np

from sglite.errors import GrammarViolation
from sglite.grammar.ask import Ask, Asks
from sglite.grammar.automaton.matcher import FollowedMatcher, take_known
from sglite.grammar.automaton.state import Said
from sglite.grammar.engines.llguidance import LLGuidanceMatcher
from sglite.grammar.matcher import OVER, REFUSED, Bitmask, Matcher, SharedMask
from sglite.grammar.residual.matcher import WithResidual


@runtime_checkable
class Layer(Protocol):
    """A matcher around another one that only takes tokens away from its mask."""

    @property
    def below(self) -> Matcher | None:
        """Whose mask this one starts from, here; None: `fill` does it all itself."""
        ...

    def finish_fill(self, row: Bitmask) -> None:
        """Narrow a row that holds the mask of `below`. Raises GrammarViolation."""
        ...


class BatchFiller:
    """See `sglite.grammar.matcher.BatchFiller`, `MaskSharer`, `MaskAsker` and `BatchAdvancer`. One thread calls it at a
    time."""

    def __init__(self, num_threads: int) -> None:
        self._executor = llguidance.LLExecutor(num_threads)
        self._asks = Asks(self._fill_native)
        self._asking = False  # the caller goes on while masks are made
        self._rows = np.empty((0, 0), np.int32)  # where masks are made that will be shared

    def fill(self, matchers: Sequence[Matcher], rows: Sequence[int], bitmask: Bitmask) -> dict[int, Exception]:
        assert bitmask.flags.c_contiguous and bitmask.dtype == np.int32 and bitmask.ndim == 2
        failures: dict[int, Exception] = {}
        bases: list[tuple[LLGuidanceMatcher, int]] = []
        chains: list[list[Matcher]] = []
        for i, (matcher, row) in enumerate(zip(matchers, rows, strict=True)):
            chain: list[Matcher] = [matcher] if type(matcher) is LLGuidanceMatcher else _peel(matcher)
            base = chain[-1]
            if type(base) is FollowedMatcher and base.known_mask() is None:
                try:
                    chain[-1] = base.exact if base.state is None and not base.stopped else base
                except GrammarViolation as error:
                    failures[i] = error
            own = chain[-1]
            if type(own) is LLGuidanceMatcher:
                made = own.start.mask if own.start is not None else self._asks.take(own)
                if made is None:
                    bases.append((own, row))
                else:
                    bitmask[row] = made
            chains.append(chain)
        self._fill_native(bases, bitmask)
        for i, (chain, row) in enumerate(zip(chains, rows, strict=True)):
            base = chain[-1]
            if i in failures or (len(chain) == 1 and isinstance(base, LLGuidanceMatcher) and not base.needs_finish):
                continue
            _guard(failures, i, lambda row, chain=chain: _finish(chain, row), bitmask[row])
        return failures

    def _fill_native(self, bases: list[tuple[LLGuidanceMatcher, int]], bitmask: Bitmask) -> None:
        if bases:
            # Each thread takes a run of neighbours: those that share a lock should be in one.
            bases.sort(key=lambda base: base[0].lock_group)
            native = [(matcher.native, row) for matcher, row in bases]
            height, width = bitmask.shape
            self._executor.unsafe_compute_mask_ptr(native, bitmask.ctypes.data, width * 4, height)

    def begin(self, matchers: Sequence[Matcher], *, alone: bool = False) -> dict[int, Ask]:
        self._asking = True
        self._asks.look()
        if self._asks.idle:
            if alone:
                return {}
            places = [i for i, matcher in enumerate(matchers) if not _is_known(matcher)]
            if len(places) < len(matchers):
                asked = self._asks.begin([_base(matchers[i]) for i in places]) if places else {}
                return {places[k]: ask for k, ask in asked.items()}
        return self._asks.begin([_base(matcher) for matcher in matchers])

    def wait(self, asked: Iterable[Ask], seconds: float) -> None:
        self._asks.wait(asked, seconds)

    def close(self) -> None:
        self._asks.close()

    def known(self, matchers: Sequence[Matcher]) -> list[SharedMask | None]:
        self._asks.look()
        return [
            state.said.mask
            if type(matcher) is FollowedMatcher and (state := matcher.state) is not None and not matcher.stopped
            else None
            for matcher in matchers
        ]

    def shared(self, matchers: Sequence[Matcher]) -> tuple[list[SharedMask | None], dict[int, Exception]]:
        matchers = [m.below if type(m) is WithResidual and m.is_transparent else m for m in matchers]
        found: list[SharedMask | None] = []
        unknown: dict[Said, list[int]] = {}
        for i, matcher in enumerate(matchers):
            mask = None
            if type(matcher) is FollowedMatcher:
                state = matcher.state
                mask = None if state is None or matcher.stopped else state.said.mask
                if mask is None:
                    mask = matcher.known_mask()
                    if mask is None and matcher.state is not None:
                        unknown.setdefault(matcher.state.said, []).append(i)
            found.append(mask)
        return found, self._make_shared(matchers, unknown, found) if unknown else {}

    def _make_shared(
        self, matchers: Sequence[Matcher], unknown: dict[Said, list[int]], found: list[SharedMask | None]
    ) -> dict[int, Exception]:
        """Ask the engine for these masks, one of the matchers that want each."""
        failures: dict[int, Exception] = {}
        asked: list[tuple[list[int], FollowedMatcher, LLGuidanceMatcher]] = []
        for places in unknown.values():
            for i in places:  # the first one whose engine has come to this place
                matcher = matchers[i]
                assert isinstance(matcher, FollowedMatcher)
                try:
                    exact = matcher.exact
                except GrammarViolation as error:
                    failures[i] = error
                    continue
                assert isinstance(exact, LLGuidanceMatcher)
                asked.append(([j for j in places if j not in failures], matcher, exact))
                break
        if not asked:
            return failures
        words = (asked[0][1].vocab_size + 31) // 32
        if self._rows.shape[0] < len(asked) or self._rows.shape[1] != words:
            self._rows = np.empty((len(asked) + 16, words), np.int32)
        self._fill_native([(exact, row) for row, (_, _, exact) in enumerate(asked)], self._rows)
        for (places, matcher, exact), row in zip(asked, self._rows, strict=False):
            try:
                exact.finish_fill(row)
            except GrammarViolation as error:
                failures.update(dict.fromkeys(places, error))
                continue
            if self._asking and matcher.asks_forced and matcher.state is not None:
                self._asks.tell_forced(matcher.state, exact)
            mask = matcher.learn(row)
            for i in places:
                found[i] = mask
        return failures

    def advance(self, matchers: Sequence[Matcher], token_ids: Sequence[int]) -> list[int]:
        verdicts, unmoved, untold = take_known(matchers, token_ids)
        for i in untold:
            verdicts[i] = self._guarded_ahead(matchers[i])
        native: list[tuple[int, LLGuidanceMatcher, int]] = []
        for i in unmoved:
            matcher, token_id = matchers[i], token_ids[i]
            try:
                own = _native_of(matcher, token_id)
                if own is not None and own.takes_first(token_id):
                    verdicts[i] = self._moved(matcher, own, token_id)
                elif own is not None:
                    native.append((i, own, token_id))
                elif matcher.accept((token_id,)):
                    verdicts[i] = self._ahead(matcher)
            except GrammarViolation:
                continue  # the engine came to a limit: this one ends, the others go on
        if native:
            self._advance_native(matchers, native, verdicts)
        return verdicts

    def _guarded_ahead(self, matcher: Matcher) -> int:
        try:
            return self._ahead(matcher)
        except GrammarViolation:  # as above
            return REFUSED

    def _advance_native(
        self, matchers: Sequence[Matcher], native: list[tuple[int, LLGuidanceMatcher, int]], verdicts: list[int]
    ) -> None:
        taken = self._executor.consume_token_par([(own.native, token_id) for _, own, token_id in native])
        for (i, own, token_id), legal in zip(native, taken, strict=True):
            if not legal:
                continue
            own.consumed()
            verdicts[i] = self._moved(matchers[i], own, token_id)

    def _moved(self, matcher: Matcher, own: LLGuidanceMatcher, token_id: int) -> int:
        if type(matcher) is FollowedMatcher:
            matcher.took(token_id)
        return self._ahead(own)

    def _ahead(self, matcher: Matcher) -> int:
        if type(matcher) is FollowedMatcher:
            # What is forced is found out with the mask, in another thread; until then it is drawn like other text.
            return 0 if self._asking and matcher.asks_forced else matcher.ahead
        return OVER if matcher.finished else len(matcher.forced())


def _native_of(matcher: Matcher, token_id: int) -> LLGuidanceMatcher | None:
    """The engine's matcher, where it alone says whether the token is legal."""
    own = matcher
    if type(own) is FollowedMatcher and own.state is None and not own.stopped:
        own = own.exact
    return own if isinstance(own, LLGuidanceMatcher) and own.takes(token_id) else None


def _guard(failures: dict[int, Exception], i: int, finish: Callable[[Bitmask], None], row: Bitmask) -> None:
    try:
        finish(row)
    except GrammarViolation as error:
        failures[i] = error


def _peel(matcher: Matcher) -> list[Matcher]:
    """The matcher, what is below it, and so on down to the one that fills itself."""
    chain = [matcher]
    while (below := getattr(matcher, "below", None)) is not None:
        chain.append(below)
        matcher = below
    return chain


def _is_known(matcher: Matcher) -> bool:
    """Surely: a look that costs nothing."""
    state = matcher.state if type(matcher) is FollowedMatcher else None
    return state is not None and state.said.mask is not None


def _base(matcher: Matcher) -> Matcher:
    """Who fills the mask that the layers narrow."""
    if type(matcher) is not FollowedMatcher and type(matcher) is not LLGuidanceMatcher:
        matcher = _peel(matcher)[-1]
    if type(matcher) is FollowedMatcher and matcher.is_engines:
        return matcher.exact
    return matcher


def _finish(chain: list[Matcher], row: Bitmask) -> None:
    base = chain[-1]
    if isinstance(base, LLGuidanceMatcher):
        base.finish_fill(row)
    else:
        base.fill(row)
    for layer in reversed(chain[:-1]):
        assert isinstance(layer, Layer)
        layer.finish_fill(row)
