"""Where in a JSON text a position is, and what stood before it that must not come again.

A step makes new values and leaves the old ones as they were. The text is well-formed JSON so far as it goes, since the
grammar took it, and each string has one spelling in it (schema/values.py), so equal keys are equal bytes.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from itertools import islice

from sglite.errors import GrammarTooLarge, InvalidGrammar
from sglite.grammar.residual.around import ValueFinder
from sglite.grammar.residual.numbers import Numbers
from sglite.grammar.residual.rules import NOTHING, ResidualRules, Shape
from sglite.grammar.schema.pattern_text import matcher
from sglite.grammar.schema.values import identity, parse_json

OUTSIDE, KEY, STRING, SCALAR, AROUND = range(5)  # AROUND: in the text around the values

_QUOTE, _BACKSLASH, _COMMA = b'"\\,'
_NO_PART = b": \t\r\n"
_OPEN_OBJECT, _CLOSE_OBJECT, _OPEN_ARRAY, _CLOSE_ARRAY = b"{}[]"
_IN_NUMBER = frozenset(b"-+.0123456789eE")
_BEGINS_NUMBER = frozenset(b"-0123456789")
_PLAIN = Shape()
_MATCH_SECONDS = 0.001  # a pattern may backtrack without end, and others wait


class Seen:
    """Things that were there, each with its text. Grows by sharing: what was made before stays as it was."""

    __slots__ = ("_things", "size")

    def __init__(self, things: dict[Hashable, tuple[int, bytes]] | None = None, size: int = 0) -> None:
        self._things: dict[Hashable, tuple[int, bytes]] = {} if things is None else things
        self.size = size

    def with_one(self, thing: Hashable, text: bytes) -> Seen:
        things = self._things
        if len(things) != self.size:  # another one went on from here
            things = dict(islice(things.items(), self.size))
        things[thing] = (self.size, text)
        return Seen(things, self.size + 1)

    def __contains__(self, thing: Hashable) -> bool:
        found = self._things.get(thing)
        return found is not None and found[0] < self.size

    def texts(self) -> Iterator[bytes]:
        return (text for _, text in islice(self._things.values(), self.size))


NOTHING_SEEN = Seen()


@dataclass(slots=True, eq=False)
class Frame:
    """An object or array that is open. Its parts: the keys of an object, the items of an array that has a rule of them.

    Not to be changed once a State holds it (`copy`; frozen ones take four times as long to make).
    """

    parent: Frame | None
    is_object: bool
    shape: Shape
    value_shape: int = NOTHING  # of the value that comes next
    seen: Seen = NOTHING_SEEN
    dead: tuple[bytes, ...] = ()  # beginnings of a part that no part which is new can have
    begin: int = -1  # offset in the text of the part at hand (a key: behind its quote); -1: between parts
    index: int = 0  # of the item at hand
    due: bool = False  # a comma (or the opening bracket) was there, and the next part was not yet
    repeats: bool = False  # some item was there twice
    pending: bytes | None = None  # the last part, as long as `dead` says nothing of it (where parts run out)

    def copy(self) -> Frame:
        return Frame(
            self.parent, self.is_object, self.shape, self.value_shape, self.seen,
            self.dead, self.begin, self.index, self.due, self.repeats, self.pending,
        )  # fmt: skip

    def resolved(self, dead: tuple[bytes, ...]) -> Frame:
        twin = self.copy()
        twin.dead, twin.pending = dead, None
        return twin


@dataclass(slots=True, eq=False)
class State:
    """Not to be changed."""

    frame: Frame
    mode: int = OUTSIDE
    escaped: bool = False  # the next byte belongs to a backslash

    @property
    def in_string(self) -> bool:
        return self.mode in (KEY, STRING)


@dataclass(slots=True, eq=False)
class Step:
    state: State
    went_on: bool = False  # a comma came where a part was pending


class Tracker:
    """`step` is a function of its arguments."""

    def __init__(self, rules: ResidualRules) -> None:
        self.rules = rules
        self.runs_out = rules.runs_out
        self.follows_values = bool(rules.shapes) or self.runs_out  # not only keys
        self._numbers = {i: Numbers(shape.numbers) for i, shape in enumerate(rules.shapes) if shape.numbers}
        self.follows_numbers = bool(self._numbers)
        self._finder = None if rules.around is None else ValueFinder(rules.around)

    def start(self) -> State:
        return _value(0 if self.rules.shapes else NOTHING) if self._finder is None else _around(0)

    def is_near_value(self, state: State, text: bytes | bytearray) -> bool:
        """Of a state around: whether one token can lead into a value, and break a rule there."""
        return self._finder is not None and self._finder.is_near(state.frame.begin, text)

    def step(self, state: State, text: bytes | bytearray, data: bytes) -> Step | None:
        """The state after `data`, given the `text` before it. None where a rule is broken on the way."""
        if self._finder is not None:
            return self._step_within(self._finder, state, text, data)
        walk = _Walk(self, state, text, data)
        for at, byte in enumerate(data):
            if not walk.take(at, byte):
                return None
        if self.runs_out and walk.is_dead(len(data)):
            return None
        if self.follows_numbers and not walk.number_is_alive(len(data)):
            return None
        return Step(walk.state(), walk.went_on)

    def _step_within(self, finder: ValueFinder, state: State, text: bytes | bytearray, data: bytes) -> Step | None:
        """The same, of values within other text."""
        at, went_on = 0, False
        while True:
            if state.mode == AROUND:
                found = finder.next_value(state.frame.begin, text, data, at)
                if found is None:
                    return Step(state, went_on)
                at, state = found[0], _value(found[1])
                if at < 0:
                    return self._step_within(finder, state, b"", bytes(text) + data)
            walk = _Walk(self, state, text, data)
            has_ended = False  # a number or word counts as text: where it ends is not for JSON to say
            while at < len(data) and not has_ended:
                if not walk.take(at, data[at]):
                    return None
                has_ended = walk.is_outermost and data[at] not in _NO_PART
                at += 1
            went_on = went_on or walk.went_on
            if has_ended:
                state = _around(len(text) + at)
                continue
            if (self.runs_out and walk.is_dead(at)) or (self.follows_numbers and not walk.number_is_alive(at)):
                return None
            return Step(walk.state(), went_on)

    def end_scalar(self, state: State, text: bytes | bytearray) -> State | None:
        """The state once a number or word ended that is at hand, before what follows it. None where it cannot end here,
        or breaks a rule if it does."""
        if state.mode != SCALAR:
            return state
        walk = _Walk(self, state, text, b"")
        walk.mode = OUTSIDE
        try:
            return walk.state() if walk.scalar_ended(0) else None
        except InvalidGrammar:  # half a word or number
            return None

    def may_run_out(self, key: bytes) -> bool:
        """Errs on the side of True: only a look at what may follow hangs on it."""
        patterns = self.rules.keys_run_out
        return bool(patterns) and any(_may_match(pattern, json.loads(b'"' + key + b'"')) for pattern in patterns)

    def numbers(self, number: int) -> Numbers | None:
        """What rules the numbers at a place of that shape, if anything does."""
        return self._numbers.get(number)

    def shape(self, number: int) -> Shape:
        return _PLAIN if number == NOTHING else self.rules.shapes[number]


def _value(shape: int) -> State:
    """Before a value that hangs on nothing."""
    return State(Frame(None, False, _PLAIN, value_shape=shape))


def _around(begin: int) -> State:
    """In the text around the values, of which the part at hand begins there."""
    return State(Frame(None, False, _PLAIN, begin=begin), AROUND)


def _may_match(pattern: str, key: str) -> bool:
    try:
        return matcher(pattern).search(key, timeout=_MATCH_SECONDS) is not None
    except TimeoutError:
        return True


class _Walk:
    __slots__ = ("_is_own", "data", "escaped", "frame", "mode", "text", "tracker", "went_on")

    def __init__(self, tracker: Tracker, state: State, text: bytes | bytearray, data: bytes) -> None:
        self.tracker = tracker
        self.frame, self.mode, self.escaped = state.frame, state.mode, state.escaped
        self.text, self.data = text, data
        self.went_on = False
        self._is_own = False  # frame was made in this walk, for no one else

    def state(self) -> State:
        return State(self.frame, self.mode, self.escaped)

    @property
    def is_outermost(self) -> bool:
        """Within no object, array or string."""
        return self.frame.parent is None and self.mode != STRING

    def take(self, at: int, byte: int) -> bool:
        if self.mode == KEY or self.mode == STRING:
            if self.escaped:
                self.escaped = False
            elif byte == _BACKSLASH:
                self.escaped = True
            elif byte == _QUOTE:
                is_key, self.mode = self.mode == KEY, OUTSIDE
                return self._key_ended(at) if is_key else self.value_ended(at + 1)
            return True
        if self.mode == SCALAR:
            if byte not in b",]} ":
                return True
            self.mode = OUTSIDE
            if not self.scalar_ended(at):
                return False
        return self._outside(at, byte)

    def scalar_ended(self, at: int) -> bool:
        """A number or word ended before `data[at]`."""
        numbers = self.tracker.numbers(self.frame.value_shape)
        number = b"" if numbers is None else self._number(at)
        return (numbers is None or not number or numbers.holds(number)) and self.value_ended(at)

    def number_is_alive(self, at: int) -> bool:
        """Whether the number before `data[at]`, if it is one and its place has a rule, can still become one of it."""
        numbers = self.tracker.numbers(self.frame.value_shape) if self.mode == SCALAR else None
        number = b"" if numbers is None else self._number(at)
        return numbers is None or not number or numbers.is_alive(number)

    def _number(self, at: int) -> bytes:
        """The number at hand, up to where `data[at]` stands; b"" where it is a word."""
        begin = at
        while begin > 0 and self.data[begin - 1] in _IN_NUMBER:
            begin -= 1
        number = self.data[begin:at]
        if begin == 0:
            begin = len(self.text)
            while begin > 0 and self.text[begin - 1] in _IN_NUMBER:
                begin -= 1
            number = bytes(self.text[begin:]) + number
        return number if number[:1] and number[0] in _BEGINS_NUMBER else b""

    def is_dead(self, at: int) -> bool:
        frame: Frame | None = self.frame
        while frame is not None:
            if frame.dead and (frame.due or frame.begin >= 0):
                begun = b"" if frame.begin < 0 else self._between(frame.begin, at)
                if any(begun.startswith(beginning) for beginning in frame.dead):
                    return True
            frame = frame.parent
        return False

    def _own_frame(self) -> Frame:
        if not self._is_own:
            self.frame = self.frame.copy()
            self._is_own = True
        return self.frame

    def _outside(self, at: int, byte: int) -> bool:
        frame = self.frame
        if byte == _QUOTE and frame.is_object and frame.due:
            frame = self._own_frame()
            frame.begin, frame.due = len(self.text) + at + 1, False
            self.mode = KEY
        elif byte == _COMMA:
            return self._comma()
        elif byte in (_CLOSE_OBJECT, _CLOSE_ARRAY):
            assert frame.parent is not None
            if frame.shape.repeated and byte == _CLOSE_ARRAY and not frame.repeats:
                return False
            self.frame, self._is_own = frame.parent, False
            return self.value_ended(at + 1)
        elif byte not in _NO_PART:
            self._value_begins(at, byte)
        return True

    def _comma(self) -> bool:
        if not self.frame.is_object and not self.tracker.follows_values:
            return True
        frame = self._own_frame()
        if b"" in frame.dead:
            return False
        self.went_on = self.went_on or frame.pending is not None
        frame.begin, frame.due, frame.pending = -1, True, None
        if not frame.is_object:
            frame.index += 1
            frame.value_shape = _item_shape(frame)
        return True

    def _value_begins(self, at: int, byte: int) -> None:
        frame = self.frame
        if (frame.shape.unique or frame.shape.repeated) and not frame.is_object:
            frame = self._own_frame()
            frame.begin, frame.due = len(self.text) + at, False
        if byte == _QUOTE:
            self.mode = STRING
        elif byte in (_OPEN_OBJECT, _OPEN_ARRAY):
            shape = self.tracker.shape(frame.value_shape)
            self.frame = frame = Frame(frame, byte == _OPEN_OBJECT, shape, due=True)
            self._is_own = True
            frame.value_shape = NOTHING if frame.is_object else _item_shape(frame)
        elif self.tracker.follows_values:
            self.mode = SCALAR

    def _key_ended(self, at: int) -> bool:
        frame = self._own_frame()
        name = self._between(frame.begin, at)
        if name in frame.seen or any(name.startswith(beginning) for beginning in frame.dead):
            return False
        shape = frame.shape
        frame.value_shape = shape.named.get(name.decode(), shape.other) if shape.named else shape.other
        frame.seen = frame.seen.with_one(name, name)
        frame.begin = -1
        frame.pending = name if self.tracker.may_run_out(name) else None
        return True

    def value_ended(self, at: int) -> bool:
        """At the place behind it, where `frame` is what holds it."""
        frame = self.frame
        if frame.is_object or not (frame.shape.unique or frame.shape.repeated):
            return True
        item = self._between(frame.begin, at)
        value = _value_of(item)
        if frame.shape.repeated:
            frame = self._own_frame()
            frame.begin = -1
            if value in frame.seen:
                frame.repeats = True
            else:
                frame.seen = frame.seen.with_one(value, item)
            return True
        if value in frame.seen or any(item.startswith(beginning) for beginning in frame.dead):
            return False
        frame = self._own_frame()
        frame.seen = frame.seen.with_one(value, item)
        frame.begin = -1
        frame.pending = item if frame.shape.runs_out else None
        return True

    def _between(self, begin: int, at: int) -> bytes:
        """The text from offset `begin` to where `data[at]` stands."""
        before = len(self.text)
        if begin >= before:
            return self.data[begin - before : at]
        return bytes(self.text[begin:]) + self.data[:at]


def _value_of(item: bytes) -> Hashable:
    """Equal for items that are equal."""
    if item[:1] == b'"':
        return item
    try:
        return identity(parse_json(item.decode()))
    except GrammarTooLarge:  # a number with thousands of digits: it has one spelling here, or may be told apart by any
        return item


def _item_shape(frame: Frame) -> int:
    items = frame.shape.items
    return items[frame.index] if frame.index < len(items) else frame.shape.rest
