"""What is known of the positions of one grammar, shared by all its completions: masks, forced text, moves by token.

A `State` stands for a position, its `Said` for all that an engine would say there. Two texts share it only where the
engine provably says the same:

- Where no byte is forced, mask and end depend on the position alone.
- Where bytes are forced, llguidance allows the first token of their canonical tokenisation, with the last token as its
  left neighbour. So these states are kept apart by the tokens that come out of that.
- Inside a plain string with a bound (`Inside`), the tokens that stay inside are those of the vocabulary's tables
  that fit the room that is left. Those that close the string do the same whatever the room was, if they fit. One
  mask of the engine, made with much room, so gives those with less, and is held against the tables when it is made.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import numpy as np

from sglite.grammar.automaton.positions import Frame, Machine, NotRead, Position, TooManyStates, Way
from sglite.grammar.automaton.regex import NotTold, Regex
from sglite.grammar.automaton.state import Inside, InsideSaid, MaskShelf, Said, State
from sglite.grammar.automaton.strings import NO_BOUND, StringTables
from sglite.grammar.canonical import ForcedSplits
from sglite.grammar.matcher import Bitmask, SharedMask
from sglite.grammar.vocab import Vocab

_LONG_LARK = 65_536  # characters of a grammar that is not read
_MOST_REGEXES = (6_000, 60_000)  # when a grammar is read (10 ms), and in all
_MOST_POSITIONS = 40_000  # about 0.5 KB each
_SHELF_BYTES = 256 << 20
_MOST_FORCED_BYTES = 512
_MOST_MOVES = 100_000  # of one grammar that are remembered
_MOST_IN_ALL = 1_000_000  # objects that are remembered of all grammars: about 300 MB


class Follower:
    """What the automata of all grammars share: tables of the vocabulary, and how much is remembered."""

    def __init__(self, vocab: Vocab, *, shelf_bytes: int = _SHELF_BYTES) -> None:
        self.vocab = vocab
        self.strings = StringTables(vocab.tokens)
        self.splits = ForcedSplits(vocab)
        self.shelf = MaskShelf(shelf_bytes)
        self.stop_mask = SharedMask(vocab.stop_mask)
        self._automata: list[weakref.ref[Automaton]] = []  # the oldest first
        self._turn = threading.Lock()  # of readers that pause: one at a time

    def automaton(self, lark: str, pause: Callable[[], None] | None = None) -> Automaton | None:
        """None for a grammar that is not followed. `pause`: called now and then while it is read."""
        if len(lark) > _LONG_LARK:
            return None
        try:
            if pause is None:
                made = Automaton(lark, self)
            else:
                with self._turn:
                    made = Automaton(lark, self, pause)
        except (NotRead, TooManyStates):
            return None
        self._make_room()
        self._automata.append(weakref.ref(made))
        return made

    def _make_room(self) -> None:
        """Where all automata together are too large, the older ones forget."""
        alive = [automaton for one in self._automata if (automaton := one()) is not None]
        self._automata = [weakref.ref(automaton) for automaton in alive]
        total = sum(automaton.size for automaton in alive)
        for automaton in alive:
            if total <= _MOST_IN_ALL:
                break
            total -= automaton.size
            automaton.forget()
            total += automaton.size


class Automaton:
    """The states of one grammar, made as they are met. Not thread-safe: the step loop owns it."""

    def __init__(self, lark: str, follower: Follower, pause: Callable[[], None] | None = None) -> None:
        """Raises NotRead or TooManyStates for a grammar that cannot be followed."""
        self.machine = Machine(
            lark,
            most_regexes=_MOST_REGEXES,
            most_positions=_MOST_POSITIONS,
            reach=follower.vocab.longest,
            pause=pause,
        )
        self.full = False  # it has met as many positions as it remembers
        self.vocab = follower.vocab
        self._tokens = follower.vocab.tokens
        self._splits = follower.splits
        self._shelf = follower.shelf
        self._strings = follower.strings
        self._tables = follower.strings.parts
        self._closed = follower.strings.closed
        self._unit, self._parts = follower.strings.parts_of(self.machine.regexes)
        self._left_of = {part: regex for regex, part in self._parts.items()} | {0: self.machine.regexes.empty}
        self._forced_parts = {part for part, left in self._left_of.items() if left.first.bit_count() == 1}
        self._by_position: dict[Position, State | None] = {}  # None: text is forced there
        self._by_forced: dict[tuple[object, ...], State] = {}
        self._forced_bytes: dict[Position | frozenset[Way], bytes] = {}
        self._insides: dict[tuple[Frame | None, Regex], Inside] = {}
        self._said: dict[object, Said] = {}
        self._said_inside: dict[tuple[Frame | None, Regex], InsideSaid] = {}
        self.stop_mask = follower.stop_mask
        self._moves = 0  # remembered ones
        self.start = self._state(self.machine.start, -1)

    @property
    def size(self) -> int:
        """Objects that are remembered, each some hundred bytes."""
        return self.machine.size + self._moves + len(self._by_forced)

    def forget(self) -> None:
        """Begin again with the start alone. States that are in use stay what they are."""
        self.machine.forget()
        for known in (self._by_position, self._by_forced, self._forced_bytes, self._insides):
            known.clear()
        self._said.clear()
        self._said_inside.clear()
        self._moves = 0
        self.start = self._state(self.machine.start, -1)

    # -- moves

    def after(self, state: State, token_id: int) -> State | None:
        """None: the token is not legal (or, where the machine is not exact, surely not). Raises TooManyStates."""
        found = state.next.get(token_id)
        if found is not None:
            return found
        inside = state.inside
        if inside is not None:
            table = self._tables[state.part]
            end = table.ends[token_id]
            if end > self._closed:
                return None
            room = state.room if state.room == NO_BOUND else state.room - table.adds[token_id]
            if room < 0:
                return None
            if end < self._closed:
                return inside.states.get((end, room)) or self._within(inside, end, room, token_id)
            found = inside.next.get((state.part, token_id))
            if found is not None:
                return found
            position = self._follow(self._behind(inside), self._strings.behind_quote(state.part, token_id))
        else:
            data = self._tokens[token_id]
            assert state.position is not None
            position = self._follow(state.position, data) if data else None
        if position is None:
            return None
        found = self._state(position, token_id)
        if self._moves < _MOST_MOVES:
            self._moves += 1
            if inside is not None:
                inside.next[state.part, token_id] = found
            else:
                state.next[token_id] = found
        return found

    def _follow(self, position: Position, data: bytes) -> Position | None:
        try:
            return self.machine.follow(position, data)
        except TooManyStates as error:
            self._met(error)
            raise

    def _met(self, limit: TooManyStates) -> None:
        """What cannot be told now cannot be told by another automaton."""
        self.full = self.full or not isinstance(limit, NotTold)

    def _state(self, position: Position, last_token: int) -> State:
        try:
            found = self._by_position[position]
        except KeyError:
            found = self._by_position[position] = self._new_state(position)
        if found is not None:
            return found
        data = self._forced_at(position)
        split = self._splits.split(data, last_token)
        key = (position, *split)
        forced = self._by_forced.get(key)
        if forced is None:
            if len(self._by_forced) >= _MOST_POSITIONS:
                self.full = True
                raise TooManyStates
            # The engine looks over all the forced text; where that is not known, only the same position is alike.
            said = self._said_at((self.machine.usual(position), data, *split)) if data else Said(is_forced=True)
            forced = self._by_forced[key] = State(position, said)
        return forced

    def _said_at(self, key: tuple[object, ...]) -> Said:
        """Of a place where text is forced."""
        said = self._said.get(key)
        if said is None:
            said = self._said[key] = Said(is_forced=True)
        return said

    def _new_state(self, position: Position) -> State | None:
        if self.machine.forced_byte(position) is not None:
            return None
        place = self._place(position)
        if place is not None:
            return self._within(*place, -1)
        finished = self.machine.is_over(position)
        usual = self.machine.usual(position)
        said = self._said.get(usual)
        if said is None:
            said = self._said[usual] = Said(finished=finished)
        return State(position, said, finished=finished)

    def _forced_at(self, position: Position) -> bytes:
        """The forced text; empty where it is too long to be looked at or takes too long to tell."""
        data = self._forced_bytes.get(position)
        if data is None:
            alike = self.machine.usual(position)
            data = self._forced_bytes.get(alike)
            if data is None:
                try:
                    data = self._read_forced(position)
                except NotTold:
                    data = b""
                if 0 < len(data) < self.vocab.longest:  # where it ends is within a token's reach
                    self._forced_bytes[alike] = data
            self._forced_bytes[position] = data
        return data

    def _read_forced(self, position: Position) -> bytes:
        data = bytearray()
        at: Position | None = position
        while at is not None and (byte := self.machine.forced_byte(at)) is not None:
            data.append(byte)
            if len(data) > _MOST_FORCED_BYTES:
                return b""
            at = self.machine.step(at, byte)
        return bytes(data)

    # -- strings

    def _place(self, position: Position) -> tuple[Inside, int, int] | None:
        """(string, part, room) where the position is inside of one plain string and nothing else."""
        if len(position.ways) != 1:
            return None
        regex, frame = position.ways[0]
        left: list[Regex] = []
        while regex.kind == "cat":
            head, tail = regex.parts
            if head.kind == "repeat" and head.parts[0] is self._unit:
                return self._place_in(left, head, tail, frame)
            left.append(head)
            regex = tail
        return None

    def _place_in(
        self, left: list[Regex], repeat: Regex, tail: Regex, frame: Frame | None
    ) -> tuple[Inside, int, int] | None:
        _, least, most = repeat.parts
        part = self._parts.get(self.machine.regexes.sequence(left)) if left else 0
        if part is None or least or tail.first != _QUOTE or tail.nullable:
            return None
        if most is not None and not self._tables[part].counts_all:
            return None
        inside = self._insides.get((frame, tail))
        if inside is None:
            alike = self.machine.usual_frame(frame), tail
            said = self._said_inside.get(alike)
            if said is None:
                said = self._said_inside[alike] = InsideSaid()
            inside = self._insides[frame, tail] = Inside(frame, tail, self._tables, said, exact=self.machine.exact)
        return inside, part, NO_BOUND if most is None else most

    def _within(self, inside: Inside, part: int, room: int, last_token: int) -> State:
        """`last_token` counts only where the string's end is forced."""
        found = inside.states.get((part, room))
        if found is not None:
            return found
        position = inside.elsewhere.get((part, room))
        if position is not None:
            return self._state(position, last_token)
        position = None
        # With room, and not within a character that can go on in one way only, at least two bytes may come.
        if not room or part in self._forced_parts or not inside.tail.alive:
            try:
                position = self._position_within(inside, part, room)
                if not room or self.machine.forced_byte(position) is not None:
                    inside.elsewhere[part, room] = position
                    return self._state(position, last_token)
            except TooManyStates as error:
                self._met(error)
                raise
        said = inside.said.places.get((part, room))
        if said is None:
            said = inside.said.places[part, room] = Said()
        state = inside.states[part, room] = State(position, said)
        state.inside, state.part, state.room = inside, part, room
        return state

    def _behind(self, inside: Inside) -> Position:
        """Behind its closing quote, whatever the string is."""
        if inside.behind is None:
            position = self._follow(self.machine.at(inside.tail, inside.frame), b'"')
            assert position is not None
            inside.behind = position
        return inside.behind

    def _position_within(self, inside: Inside, part: int, room: int) -> Position:
        regexes = self.machine.regexes
        more = regexes.repeat(self._unit, 0, None if room == NO_BOUND else room)
        return self.machine.at(regexes.sequence((self._left_of[part], more, inside.tail)), inside.frame)

    # -- masks

    def mask(self, state: State) -> SharedMask | None:
        """None: an engine has to be asked, and what it says be given to `learn`."""
        if state.said.mask is not None:
            return state.said.mask
        if state.finished:
            return self.stop_mask
        if state.inside is None:
            return None
        said, part = state.inside.said, state.part
        closers = said.closers.get(part)
        if closers is None or closers[0] < state.room:
            return None
        table = self._tables[part]
        if state.room < table.most:
            return self._shelf.put(state.said, (table.stays | closers[1]) & table.within(state.room))
        loose = said.loose.get(part)
        if loose is None:
            loose = said.loose[part] = SharedMask(table.stays | closers[1])
        state.said.mask = loose  # kept by the string, so no shelf counts it
        return loose

    def learn(self, state: State, words: Bitmask) -> SharedMask:
        """`words`: an engine's mask in this state; taken over."""
        inside = state.inside
        if inside is not None and inside.said.closers.get(state.part, _UNKNOWN) is not None:
            table = self._tables[state.part]
            closers = words & table.closes
            enough = state.room >= table.most
            expected = table.stays | closers
            if not enough:
                expected &= table.within(state.room)
            agrees = np.array_equal(words, expected)
            inside.said.closers[state.part] = (NO_BOUND if enough else state.room, closers) if agrees else None
        return self._shelf.put(state.said, words)


_UNKNOWN = (0, None)
_QUOTE = 1 << ord('"')
