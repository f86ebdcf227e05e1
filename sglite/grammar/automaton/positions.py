"""Where a text stands within a grammar: the set of the ways to have read it so far.

    way = (what is left of the terminal being read, the stack of what follows it)

Ways of equal texts to come are equal objects, so a position (the set) is a key: two texts at the same position have
the same continuations. After a value in an object or array nothing of its content is left in the position. Repeats
count up to where the count stops to matter.

Where a terminal has & or ~, `exact` is False: whether a way can be completed is then searched for, and ways that
cannot are left out.
"""

from __future__ import annotations

from collections.abc import Callable

from sglite.grammar.automaton.counts import Counts
from sglite.grammar.automaton.emptiness import is_alive
from sglite.grammar.automaton.lark import Group, NotRead, RuleRef, Rules, Sequence, read
from sglite.grammar.automaton.regex import Regex, Regexes, TooManyStates

_MOST_WAYS = 64  # of one position
_MOST_DEPTH = 200  # rules within each other without a byte between


class Frame:
    """One stack, by its top: what is still to come of a sequence or a repeat, and the frame below."""

    __slots__ = ("below", "body", "count", "heads", "symbols", "usual")

    def __init__(self, symbols: Sequence, body: Group | None, count: int, below: Frame | None) -> None:
        self.symbols = symbols  # of a sequence
        self.body = body  # of a repeat, `count` of which were read
        self.count = count
        self.below = below
        self.heads: tuple[tuple[Way, ...], bool] | None = None
        self.usual: Frame | None = None  # the one that stands for all that a token cannot tell from it


Way = tuple[Regex, Frame | None]


class Position:
    __slots__ = ("can_end", "rests", "usual", "ways")

    def __init__(self, ways: tuple[Way, ...], *, can_end: bool) -> None:
        self.ways = ways
        self.can_end = can_end  # the text so far is complete
        self.rests: dict[int, Position | None] = {}  # by byte; what was asked for
        self.usual: frozenset[Way] | None = None


class Machine:
    """The positions of one grammar. Every method may raise TooManyStates."""

    def __init__(
        self,
        lark: str,
        *,
        most_regexes: tuple[int, int],
        most_positions: int,
        reach: int,
        pause: Callable[[], None] | None = None,
    ) -> None:
        """`most_regexes`: while the grammar is read, and in all. `reach`: bytes of the longest token. `pause`: called
        now and then while it is read. Raises NotRead, too."""
        self.regexes = Regexes(most_regexes[0], pause)
        self._rules: Rules = read(lark, self.regexes)
        self.regexes.most, self.regexes.pause = most_regexes[1], None
        self.exact = " & " not in lark and "~" not in lark and "[lazy]" not in lark
        self._counts = Counts(self._rules, reach)
        self._most = most_positions
        self._frames: dict[tuple[object, ...], Frame] = {}
        self._positions: dict[frozenset[Way], Position] = {}
        self.start = self._start()

    def _start(self) -> Position:
        return self._position([(self.regexes.empty, self._sequence((RuleRef("start"),), None))])

    @property
    def size(self) -> int:
        """Objects that are remembered."""
        return len(self._positions) + len(self._frames) + len(self.regexes)

    def forget(self) -> None:
        """Begin again with the start alone. Positions that are in use stay what they are."""
        self._positions.clear()
        self._frames.clear()
        self.start = self._start()

    def at(self, regex: Regex, frame: Frame | None) -> Position:
        """The position of one way alone."""
        return self._position([(regex, frame)])

    def step(self, position: Position, byte: int) -> Position | None:
        """None: no text goes on like this."""
        try:
            return position.rests[byte]
        except KeyError:
            found = position.rests[byte] = self._step(position, byte)
            return found

    def follow(self, position: Position, data: bytes) -> Position | None:
        at: Position | None = position
        for byte in data:
            at = self.step(at, byte)  # pyright: ignore[reportArgumentType]
            if at is None:
                return None
        return at

    def forced_byte(self, position: Position) -> int | None:
        """The only byte that may come, where there is one and the text may not end."""
        if position.can_end:
            return None
        first = self.first_bytes(position)
        if first.bit_count() > 1:
            if self.exact:
                return None
            first = self._alive(position, first)
        return first.bit_length() - 1 if first.bit_count() == 1 else None

    def is_over(self, position: Position) -> bool:
        """The text is complete and nothing may follow it."""
        if not position.can_end:
            return False
        first = self.first_bytes(position)
        return not first or (not self.exact and not self._alive(position, first))

    def first_bytes(self, position: Position) -> int:
        """A bit set; where the machine is not exact it may hold too many (`_alive`)."""
        found = 0
        for regex, frame in position.ways:
            found |= regex.first
            if regex.nullable:
                for head, _ in self._heads(frame)[0]:
                    found |= head.first
        return found

    def _alive(self, position: Position, first: int) -> int:
        """Those of the bytes that lead on; no more than two of them."""
        found = 0
        for byte in range(256):
            if first >> byte & 1 and self.step(position, byte) is not None:
                found |= 1 << byte
                if found.bit_count() > 1:
                    break
        return found

    def usual(self, position: Position) -> frozenset[Way]:
        """Equal for positions that have the same continuations as far as a token goes."""
        if position.usual is None:
            position.usual = frozenset((regex, self.usual_frame(frame)) for regex, frame in position.ways)
        return position.usual

    def usual_frame(self, frame: Frame | None) -> Frame | None:
        """The stack with counts that a token cannot tell from its own."""
        new: list[Frame] = []
        while frame is not None and frame.usual is None:
            new.append(frame)
            frame = frame.below
        found = None if frame is None else frame.usual
        for one in reversed(new):
            count = one.count if one.body is None else self._counts.usual(one.body, one.count)
            found = one.usual = self._frame(one.symbols, one.body, count, found)
        return found

    # -- sets of ways

    def _position(self, ways: list[Way]) -> Position:
        key = frozenset(ways)
        found = self._positions.get(key)
        if found is None:
            if len(key) > _MOST_WAYS or len(self._positions) >= self._most:
                raise TooManyStates
            can_end = any(regex.nullable and self._heads(frame)[1] for regex, frame in key)
            found = self._positions[key] = Position(tuple(key), can_end=can_end)
        return found

    def _step(self, position: Position, byte: int) -> Position | None:
        found: list[Way] = []
        for regex, frame in position.ways:
            self._read(regex, frame, byte, found)
            if regex.nullable:
                for head, after in self._heads(frame)[0]:
                    self._read(head, after, byte, found)
        return self._position(found) if found else None

    def _read(self, regex: Regex, frame: Frame | None, byte: int, found: list[Way]) -> None:
        rest = self.regexes.rest(regex, byte)
        if rest.alive or (rest.alive is None and is_alive(self.regexes, rest)):
            found.append((rest, frame))

    # -- stacks

    def _sequence(self, symbols: Sequence, below: Frame | None) -> Frame | None:
        return self._frame(symbols, None, 0, below) if symbols else below

    def _frame(self, symbols: Sequence, body: Group | None, count: int, below: Frame | None) -> Frame:
        key = (symbols, body, count, below)
        found = self._frames.get(key)
        if found is None:
            if len(self._frames) >= self._most:
                raise TooManyStates
            found = self._frames[key] = Frame(symbols, body, count, below)
        return found

    def _heads(self, frame: Frame | None) -> tuple[tuple[Way, ...], bool]:
        """The terminals that may come next, each with the stack behind it, and whether the text may end here."""
        if frame is None:
            return (), True
        if frame.heads is None:
            found: dict[Way, None] = {}
            ends = self._collect(frame, found, 0)
            frame.heads = tuple(found), ends
        return frame.heads

    def _collect(self, frame: Frame | None, found: dict[Way, None], depth: int) -> bool:
        if frame is None:
            return True
        if depth > _MOST_DEPTH:
            raise TooManyStates
        body = frame.body
        if body is not None:
            ends = frame.count >= body.least and self._collect(frame.below, found, depth + 1)
            if body.most is None or frame.count < body.most:
                count = min(frame.count + 1, body.least) if body.most is None else frame.count + 1
                after = self._frame((), body, count, frame.below)
                for option in body.options:
                    ends |= self._collect(self._sequence(option, after), found, depth + 1)
            return ends
        symbol, after = frame.symbols[0], self._sequence(frame.symbols[1:], frame.below)
        if isinstance(symbol, RuleRef):
            options = [self._collect(self._sequence(o, after), found, depth + 1) for o in self._rules[symbol.name]]
            return any(options)
        if isinstance(symbol, Group):
            return self._collect(self._frame((), symbol, 0, after), found, depth + 1)
        found[symbol, after] = None
        return symbol.nullable and self._collect(after, found, depth + 1)


__all__ = ["Frame", "Machine", "NotRead", "Position", "TooManyStates", "Way"]
