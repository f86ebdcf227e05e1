"""Masks that only an engine can tell, made in other threads while the step loop goes on.

    begin      the matchers whose mask is not known; one of those that stand at the same place is asked for all
    a thread   brings the engine's matchers up to date and has the masks made, all of one call at once
    another    asks copies of those at places of forced text which text that is: it takes ten times as long as the mask
    collect    what has come is remembered (or, for a matcher that remembers nothing, kept until `take`)

While a matcher is asked for its mask it belongs to that thread: its row is not sampled, so nobody else touches it.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from sglite.errors import GrammarViolation
from sglite.grammar import bitmask
from sglite.grammar.automaton.matcher import FollowedMatcher
from sglite.grammar.automaton.state import Said, State
from sglite.grammar.engines.llguidance import LLGuidanceMatcher
from sglite.grammar.matcher import Bitmask, Matcher

_log = logging.getLogger(__name__)
_THREADS = 4  # calls whose masks are made at the same time: a slow one does not hold up the next

FillNative = Callable[[list[tuple[LLGuidanceMatcher, int]], Bitmask], None]


class Ask:
    """One mask that is being made. `row` None once it is done: it could not be; whoever asks again is told why."""

    __slots__ = ("at", "done", "matcher", "row", "state")

    def __init__(self, matcher: FollowedMatcher | LLGuidanceMatcher, at: int) -> None:
        self.matcher = matcher
        self.state = matcher.state if isinstance(matcher, FollowedMatcher) else None  # it may have moved on by the end
        self.at = at  # tokens that an engine's matcher had taken
        self.row: Bitmask | None = None
        self.done = False


class Asks:
    """`begin`, `wait`, `take`, `look` and `close` are called by one thread."""

    def __init__(self, fill_native: FillNative) -> None:
        self._fill_native = fill_native
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="sglite-masks")
        self._open: dict[Said | LLGuidanceMatcher, Ask] = {}
        self._changed = threading.Condition()
        self._forced_pool = ThreadPoolExecutor(1, thread_name_prefix="sglite-forced")
        self._telling: set[Said] = set()  # places of which somebody is finding out what is forced there
        self._told: deque[tuple[Said, tuple[int, ...] | None]] = deque()  # and what it is; None: it could not be told

    @property
    def idle(self) -> bool:
        """No mask is asked for, and none waits to be taken."""
        return not self._open

    def begin(self, matchers: Sequence[Matcher]) -> dict[int, Ask]:
        """Those of the matchers (by place; layers peeled off) that an engine has to be asked for and that are not done.
        Forgets what was made for others."""
        self._collect()
        found: dict[int, Ask] = {}
        wanted: set[Said | LLGuidanceMatcher] = set()
        new: list[Ask] = []
        for i, matcher in enumerate(matchers):
            own = matcher.own if self._open and isinstance(matcher, FollowedMatcher) else None
            asked = self._open.get(own) if isinstance(own, LLGuidanceMatcher) else None
            if asked is not None and not asked.done:  # its automaton came while it was asked without one
                found[i] = asked
                continue
            key = _asked_of(matcher)
            if key is None:
                continue
            wanted.add(key)
            assert isinstance(matcher, (FollowedMatcher, LLGuidanceMatcher))
            at = matcher.num_tokens if isinstance(matcher, LLGuidanceMatcher) else 0
            ask = self._open.get(key)
            if ask is None or (ask.done and ask.at != at):
                ask = self._open[key] = Ask(matcher, at)
                new.append(ask)
            if not ask.done:
                found[i] = ask
        for key, ask in list(self._open.items()):
            if ask.done and key not in wanted:
                del self._open[key]
        if new:
            self._pool.submit(self._answer, new)
        return found

    def wait(self, asks: Iterable[Ask], seconds: float) -> None:
        """Until all are done, or the time is over."""
        asks = list(asks)
        with self._changed:
            self._changed.wait_for(lambda: all(ask.done for ask in asks), seconds)
        self._collect()

    def take(self, matcher: LLGuidanceMatcher) -> Bitmask | None:
        """What was made for it at this place."""
        ask = self._open.get(matcher)
        if ask is None or not ask.done:
            return None
        del self._open[matcher]
        return ask.row if ask.at == matcher.num_tokens else None

    def tell_forced(self, state: State, engines: LLGuidanceMatcher) -> None:
        """Have it found out what text is forced at a place. `engines`: a matcher that stands there."""
        if state.said not in self._telling:
            self._telling.add(state.said)
            self._forced_pool.submit(self._tell, state.said, engines.fork())

    def look(self) -> None:
        """Remember the forced texts that have come."""
        while self._told:
            said, forced = self._told.popleft()
            self._telling.discard(said)
            if forced is not None:
                said.forced, said.ahead = forced, len(forced)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._forced_pool.shutdown(wait=True, cancel_futures=True)

    def _collect(self) -> None:
        self.look()
        for key, ask in list(self._open.items()):
            if ask.done and isinstance(ask.matcher, FollowedMatcher):
                del self._open[key]
                if ask.row is not None:
                    ask.matcher.learn(ask.row, state=ask.state)

    def _answer(self, asks: list[Ask]) -> None:
        try:
            self._make(asks)
        except BaseException:
            _log.exception("masks could not be made")
            raise
        finally:
            with self._changed:
                for ask in asks:
                    ask.done = True
                self._changed.notify_all()

    def _make(self, asks: list[Ask]) -> None:
        ready: list[tuple[Ask, LLGuidanceMatcher]] = []
        for ask in asks:
            try:
                own = ask.matcher.exact if isinstance(ask.matcher, FollowedMatcher) else ask.matcher
            except GrammarViolation:
                continue
            assert isinstance(own, LLGuidanceMatcher)
            ready.append((ask, own))
        if not ready:
            return
        rows = np.empty((len(ready), bitmask.words(ready[0][1].vocab_size)), np.int32)
        self._fill_native([(own, row) for row, (_, own) in enumerate(ready)], rows)
        for (ask, own), row in zip(ready, rows, strict=True):
            try:
                own.finish_fill(row)
            except GrammarViolation:
                continue
            ask.row = row
            if ask.state is not None and ask.state.said.ahead is None:
                self.tell_forced(ask.state, own)

    def _tell(self, said: Said, engines: LLGuidanceMatcher) -> None:
        forced: tuple[int, ...] | None = None
        try:
            forced = tuple(engines.forced())
        except GrammarViolation:
            pass  # its text comes to a limit: whoever gets there is told
        except BaseException:
            _log.exception("forced text could not be told")
            raise
        finally:
            self._told.append((said, forced))


def _asked_of(matcher: Matcher) -> Said | LLGuidanceMatcher | None:
    """Who stands for the mask; None where no engine has to be asked, or not one that is asked in other threads."""
    if type(matcher) is FollowedMatcher:
        if matcher.stopped or matcher.known_mask() is not None:
            return None
        return None if matcher.state is None else matcher.state.said
    return matcher if type(matcher) is LLGuidanceMatcher and matcher.start is None else None
