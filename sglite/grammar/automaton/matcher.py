"""A matcher that goes from state to state of its grammar's automaton, and asks the engine for what is not known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sglite.errors import GrammarViolation
from sglite.grammar.automaton.positions import TooManyStates
from sglite.grammar.automaton.state import Run, State
from sglite.grammar.automaton.states import Automaton
from sglite.grammar.automaton.strings import NO_BOUND
from sglite.grammar.matcher import OVER, REFUSED, Bitmask, Matcher, SharedMask
from sglite.grammar.vocab import Vocab


class Followed(Protocol):
    """A grammar whose automaton may be there later."""

    automaton: Automaton | None

    def exact_matcher(self) -> Matcher:
        """An engine's matcher at the start."""
        ...


class FollowedMatcher:
    """See `sglite.grammar.matcher.Matcher`.

    `state` None: there is no automaton yet, or the text went where it does not remember, and the engine's matcher is
    all there is. Else that one lags behind: it is shown the tokens when it is asked something.
    """

    __slots__ = (
        "_automaton",
        "_behind",
        "_grammar",
        "_num_stops",
        "_own",
        "_vocab",
        "state",
        "states",
        "tokens",
    )

    def __init__(self, grammar: Followed, vocab: Vocab) -> None:
        self.state: State | None = None
        self.states: list[State] = []  # after each token, as far as they were followed
        self.tokens: list[int] = []  # accepted, without stop ids
        self._grammar = grammar
        self._vocab = vocab
        self._automaton: Automaton | None = None
        self._own: Matcher | None = None
        self._behind = 0  # how many of `tokens` it has been shown
        self._num_stops = 0
        self._begin()

    def _begin(self) -> None:
        """Follow the automaton, if it is there by now."""
        automaton = self._automaton = self._grammar.automaton
        if automaton is None:
            return
        state: State | None = automaton.start
        states: list[State] = []
        try:
            for token_id in self.tokens:
                state = automaton.after(state, token_id)
                if state is None:
                    return
                states.append(state)
        except TooManyStates:
            return
        self.state, self.states = state, states

    @property
    def vocab_size(self) -> int:
        return self._vocab.size

    @property
    def stopped(self) -> bool:
        """A stop id was accepted."""
        return self._num_stops > 0

    # -- the engine's matcher

    @property
    def own(self) -> Matcher | None:
        """The engine's matcher, wherever it stands; None: it has none yet."""
        return self._own

    @property
    def is_engines(self) -> bool:
        """There is no automaton here: the engine's matcher, which stands here, is all there is."""
        if self._automaton is None:
            self._begin()
        return self.state is None and not self._num_stops

    @property
    def exact(self) -> Matcher:
        """The engine's matcher, at this place."""
        own = self._own
        if own is None:
            own = self._own = self._grammar.exact_matcher()
        if self._behind < len(self.tokens):
            missing = self.tokens[self._behind :]
            taken = own.accept(missing)
            self._behind += taken
            if taken < len(missing):
                raise GrammarViolation(
                    "the grammar engine refuses what it allowed before: it reached one of its limits"
                )
        return own

    def _leave(self) -> None:
        """From here on the engine's matcher does it all."""
        _ = self.exact
        self.state = None

    # -- Matcher

    def accept(self, token_ids: Sequence[int]) -> int:
        for done, token_id in enumerate(token_ids):
            if not (self._accept_stop() if token_id in self._vocab.stop_ids else self._accept(token_id)):
                return done
        return len(token_ids)

    def known_run(self) -> Run | None:
        """All that is forced here; None where it is to be found the long way, or where the output is over behind it."""
        state = self.state
        if state is None or self._num_stops:
            return None
        if state.run is None:
            state.run = self._find_run(state)
        return state.run

    def _find_run(self, state: State) -> Run | None:
        automaton, states = self._automaton, []
        assert automaton is not None
        tokens = state.said.forced or ()
        at: State | None = state
        try:
            for token_id in tokens:  # an engine's word: whether they are legal is not asked
                at = at.next.get(token_id) or automaton.after(at, token_id)
                if at is None:
                    return None
                states.append(at)
        except TooManyStates:
            return None
        return Run(tokens, tuple(states)) if states and not states[-1].finished else None

    def take_run(self, run: Run) -> None:
        """Accept what `known_run` gave."""
        self.state = run.states[-1]
        self.states += run.states
        self.tokens += run.tokens

    def _accept_stop(self) -> bool:
        if not self.can_stop:
            return False
        self._num_stops += 1
        return True

    def _accept(self, token_id: int) -> bool:
        if self._num_stops or not 0 <= token_id < self._vocab.size:
            return False
        state = self.state
        if state is not None:
            found = state.next.get(token_id)
            if found is None:
                try:
                    found = self._look(state, token_id)
                except TooManyStates:
                    self._leave()
                    return self._accept(token_id)
                if found is None:
                    return False
            self.state = found
            self.states.append(found)
            self.tokens.append(token_id)
            return True
        if not self.exact.accept((token_id,)):
            return False
        self.took(token_id)
        return True

    def _look(self, state: State, token_id: int) -> State | None:
        automaton = self._automaton
        assert automaton is not None
        found = automaton.after(state, token_id)
        if found is not None and not automaton.machine.exact:
            if not self.exact.accept((token_id,)):
                state.next.pop(token_id, None)
                return None
            self._behind += 1
        return found

    def rollback(self, num_tokens: int) -> None:
        assert 0 <= num_tokens <= len(self.tokens) + self._num_stops, "rollback past the start"
        stops = min(num_tokens, self._num_stops)
        self._num_stops -= stops
        left = len(self.tokens) - (num_tokens - stops)
        del self.tokens[left:]
        if self._behind > left:
            assert self._own is not None
            self._own.rollback(self._behind - left)
            self._behind = left
        if self._automaton is not None and left <= len(self.states):
            del self.states[left:]
            self.state = self.states[-1] if self.states else self._automaton.start

    def fork(self) -> FollowedMatcher:
        twin = FollowedMatcher(self._grammar, self._vocab)
        twin._automaton = self._automaton
        twin.state, twin.states, twin.tokens = self.state, list(self.states), list(self.tokens)
        twin._own = None if self._own is None else self._own.fork()
        twin._behind, twin._num_stops = self._behind, self._num_stops
        return twin

    def fill(self, row: Bitmask) -> None:
        mask = self.known_mask()
        if self._num_stops:  # which the engine's matcher was not shown
            row[:] = self._vocab.stop_mask
        elif mask is None:
            self.exact.fill(row)
            self.learn(row)
        else:
            row[:] = mask.words

    def known_mask(self) -> SharedMask | None:
        """The mask, where it takes no engine to tell."""
        if self._automaton is None:
            self._begin()
        automaton = self._automaton
        if automaton is None or self.state is None:
            return None
        return automaton.stop_mask if self._num_stops else automaton.mask(self.state)

    @property
    def asks_forced(self) -> bool:
        """An engine has to tell what is forced here."""
        return self.state is not None and not self._num_stops and self.state.said.ahead is None

    def learn(self, row: Bitmask, *, state: State | None = None) -> SharedMask | None:
        """`row` holds what the engine's matcher says here, or said where `state` was."""
        if state is None:
            state = None if self._num_stops else self.state
        if self._automaton is None or state is None:
            return None
        return self._automaton.learn(state, row.copy())

    def took(self, token_id: int) -> None:
        """The engine's matcher, being all there is, took one token by another way."""
        self.tokens.append(token_id)
        self._behind += 1

    def forced(self) -> list[int]:
        if self._num_stops:
            return []
        state = self.state
        if state is None:
            return self.exact.forced()
        said = state.said
        if said.forced is None:
            said.forced = tuple(self.exact.forced())
        return list(said.forced)

    @property
    def ahead(self) -> int:
        """OVER, or how many tokens are forced."""
        state = self.state
        if state is None or self._num_stops:
            return OVER if self.finished else len(self.forced())
        said = state.said
        if said.ahead is None:
            said.ahead = len(self.forced())
        return said.ahead

    @property
    def can_stop(self) -> bool:
        if self._num_stops:
            return True
        return self.exact.can_stop if self.state is None else self.state.can_stop

    @property
    def finished(self) -> bool:
        if self._num_stops:
            return True
        return self.exact.finished if self.state is None else self.state.finished


def take_known(matchers: Sequence[Matcher], token_ids: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    """Have each accept its token where that move is known. Returns what is `ahead` of each, REFUSED for those that did
    not move, and the places of these; and the places of those that moved to where nobody knows yet what is ahead.

    One loop without calls: a step of many rows waits for it."""
    aheads: list[int] = []
    unmoved: list[int] = []
    untold: list[int] = []
    for matcher, token_id in zip(matchers, token_ids, strict=True):
        found: State | None = None
        if type(matcher) is FollowedMatcher and not matcher._num_stops and (state := matcher.state) is not None:
            found = state.next.get(token_id)
            if found is None and (inside := state.inside) is not None:
                table, room = inside.tables[state.part], state.room
                if room != NO_BOUND:
                    room -= table.adds[token_id]
                found = inside.states.get((table.ends[token_id], room))
                if found is None and inside.exact and room >= 0:  # it closes the string, perhaps
                    found = inside.next.get((state.part, token_id))
            if found is not None:
                matcher.state = found
                matcher.states.append(found)
                matcher.tokens.append(token_id)
                ahead = found.said.ahead
                if ahead is None:
                    untold.append(len(aheads))
                aheads.append(ahead or 0)
                continue
        unmoved.append(len(aheads))
        aheads.append(REFUSED)
    return aheads, unmoved, untold
