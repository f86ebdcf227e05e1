"""Which sets of strings have a string in common, told from their patterns' trees.

Whether one string is in all of some sets and in none of others is a search through what is left of each after a
character: tuples of derivatives (Regexes), where characters that no pattern tells apart count as one. Its symbols are
"bytes" to Regexes: the 128 characters of ASCII, and classes of the others.

    told_apart([any], [/^a/, /b$/])  ->  {}, {0}, {1}, {0, 1}      told_apart([any], [/^a/, /^b/])  ->  {}, {0}, {1}
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from operator import is_

from sglite.grammar.automaton.classes import complement
from sglite.grammar.automaton.regex import Regex, Regexes, TooManyStates
from sglite.grammar.schema.pattern import (
    ANY_CHAR,
    MAX_CODE_POINT,
    Alt,
    Cat,
    Chars,
    Look,
    Pattern,
    PatternError,
    Repeat,
)
from sglite.grammar.schema.pattern_text import Expression

_MOST_LOOKS = 1_000  # tuples whose own rests are made: 10 ms
_MOST_REGEXES = 20_000
_MOST_PARTS = 5_000  # of one tree
_MOST_ROWS = 2_000  # of a table that is used again
_MOST_TABLES = 16  # kept
_ASCII = 128
_SYMBOLS = 256
_SURROGATES = (0xD800, 0xE000)


class _NotKnown(Exception):
    """A tree with a look-around or a Unicode property, or a large one."""


class Languages:
    """Remembers, for the expressions of one grammar."""

    def __init__(self) -> None:
        self._breaks: list[int] = []  # where classes of characters behind ASCII begin
        self._known: dict[str, Regex] = {}
        self._sets: dict[str, frozenset[int]] = {}  # of each known expression: the sets of symbols that it speaks of
        self._begin()

    def _begin(self) -> None:
        self._regexes = Regexes(_MOST_REGEXES)
        self._known.clear()
        self._sets.clear()
        self._tables: dict[frozenset[int], _Table] = {}
        starts = [_ASCII, *self._breaks]
        self._symbols = (1 << _ASCII) - 1
        for i, start in enumerate(starts):
            if not _SURROGATES[0] <= start < _SURROGATES[1]:
                self._symbols |= 1 << (_ASCII + i)

    def is_empty(self, parts: Sequence[str]) -> bool | None:
        """Whether no string is in all of them; None where that cannot be told."""
        found = self._vectors(parts, ())
        return None if found is None else not found

    def told_apart(self, base: Sequence[str], options: Sequence[str]) -> set[frozenset[int]] | None:
        """The sets of options (by number) such that some string in all of `base` is in just these of the options; None
        where that cannot be told."""
        found = self._vectors(base, options)
        return None if found is None else {frozenset(i for i, there in enumerate(v) if there) for v in found}

    def _vectors(self, base: Sequence[str], options: Sequence[str]) -> set[tuple[bool, ...]] | None:
        parts: list[Expression] = []
        for part in (*base, *options):
            if not isinstance(part, Expression):
                return None
            parts.append(part)
        try:
            self._take(parts)
            regexes = tuple([self._regex(part) for part in parts])
            table = self._table(frozenset().union(*[self._sets[part.positive] for part in parts]))
            return self._search(table, regexes, [not part.negated for part in parts[: len(base)]])
        except (_NotKnown, TooManyStates, PatternError):
            return None

    # -- the search

    def _search(self, table: _Table, start: tuple[Regex, ...], wanted: list[bool]) -> set[tuple[bool, ...]] | None:
        """Which of the regexes after the first ones take a string that those do, as `wanted`. None: it takes too long.

        From both ends of the queue in turn: the nearest end of a string may be near, or a long way straight on.
        """
        fixed = len(wanted)
        lost = [self._regexes.nothing if want else self._regexes.everything for want in wanted]
        rows, row = table.rows, table.row
        found: set[tuple[bool, ...]] = set()
        seen = {start}
        queue = deque([start])
        looks = 0
        while queue:
            looks += 1
            if looks > _MOST_LOOKS:
                return None
            here = queue.pop() if looks % 2 else queue.popleft()
            if [regex.nullable for regex in here[:fixed]] == wanted:
                found.add(tuple([regex.nullable for regex in here[fixed:]]))
                if fixed == len(here):
                    return found
            for there in zip(*[rows.get(regex) or row(regex) for regex in here], strict=True):
                if there not in seen:
                    seen.add(there)
                    if not any(map(is_, there, lost)):
                        queue.append(there)
        return found

    def _table(self, sets: frozenset[int]) -> _Table:
        found = self._tables.get(sets)
        if found is None or found.size > _MOST_ROWS:
            if len(self._tables) >= _MOST_TABLES:
                self._tables.clear()
            found = self._tables[sets] = _Table(self._regexes, _representatives(self._symbols, sets))
        return found

    # -- trees to regexes

    def _take(self, parts: list[Expression]) -> None:
        """See that the classes of characters are fine enough for all of the parts."""
        breaks: set[int] = set()
        for part in parts:
            if part.positive not in self._known:
                breaks |= _breaks(part.tree) if part.words is None else _breaks_of_words(part.words)
        if not breaks.issubset(self._breaks):
            self._breaks = sorted(breaks.union(self._breaks))
            if len(self._breaks) >= _SYMBOLS - _ASCII:
                self._breaks = []
                raise _NotKnown
            self._begin()

    def _regex(self, part: Expression) -> Regex:
        found = self._known.get(part.positive)
        if found is None:
            sets: set[int] = set()
            if part.words is not None:
                found = self._of_words(part.words, sets)
            else:
                assert part.tree is not None  # `_take` has seen it
                found = self._made(part.tree, sets)
            self._known[part.positive] = found
            self._sets[part.positive] = frozenset(sets)
        return found

    def _made(self, tree: Pattern, sets: set[int]) -> Regex:
        """Adds to `sets` what the tree speaks of."""
        match tree:
            case Chars():
                members = self._members(tree)
                sets.add(members)
                return self._regexes.bytes_of(members)
            case Cat(parts):
                return self._regexes.sequence([self._made(part, sets) for part in parts])
            case Alt(options):
                return self._regexes.union([self._made(option, sets) for option in options])
            case Repeat(body, 0, None) if body == ANY_CHAR:
                return self._regexes.everything
            case Repeat(body, least, most):
                return self._regexes.repeat(self._made(body, sets), least, most)
        raise _NotKnown

    def _of_words(self, words: Iterable[str], sets: set[int]) -> Regex:
        """The same as of the tree of the words."""
        members = {char: self._members(Chars(((ord(char), ord(char)),))) for char in set().union(*words)}
        sets.update(members.values())
        chars = {char: self._regexes.bytes_of(member) for char, member in members.items()}
        return self._regexes.union([self._regexes.sequence([chars[char] for char in word]) for word in words])

    def _members(self, chars: Chars) -> int:
        members = 0
        for low, high in complement(chars.ranges) if chars.negated else chars.ranges:
            if low < _ASCII:
                members |= (1 << (min(high, _ASCII - 1) + 1)) - (1 << low)
            if high >= _ASCII:
                first = bisect_left(self._breaks, low) + 1 if low > _ASCII else 0
                last = bisect_left(self._breaks, high + 1)
                members |= (1 << (_ASCII + last + 1)) - (1 << (_ASCII + first))
        return members & self._symbols


class _Table:
    """What is left of an expression after each of some symbols."""

    def __init__(self, regexes: Regexes, symbols: list[int]) -> None:
        self._regexes = regexes
        self._symbols = symbols
        self.rows: dict[Regex, list[Regex]] = {}

    @property
    def size(self) -> int:
        return len(self.rows)

    def row(self, regex: Regex) -> list[Regex]:
        found = self.rows.get(regex)
        if found is None:
            found = self.rows[regex] = [self._regexes.rest(regex, symbol) for symbol in self._symbols]
        return found


def _representatives(symbols: int, sets: Iterable[int]) -> list[int]:
    """One of `symbols` of each class that the sets do not tell apart."""
    classes = [symbols]
    for members in sets:
        classes = [part for c in classes for part in (c & members, c & ~members) if part]
    return [(c & -c).bit_length() - 1 for c in classes]


def _breaks_of_words(words: tuple[str, ...]) -> set[int]:
    if 1 + len(words) + sum(map(len, words)) > _MOST_PARTS:
        raise _NotKnown
    codes = [ord(char) for char in set().union(*words)]
    return {at for code in codes for at in (code, code + 1) if _ASCII < at <= MAX_CODE_POINT} | set(_SURROGATES)


def _breaks(tree: Pattern | None) -> set[int]:
    """Where, behind ASCII, some class of the tree begins or is over."""
    if tree is None:
        raise _NotKnown
    found: set[int] = set()
    stack = [tree]
    parts = 0
    while stack:
        parts += 1
        if parts > _MOST_PARTS:
            raise _NotKnown
        match stack.pop():
            case Chars(ranges, _, properties):
                if properties:
                    raise _NotKnown
                for low, high in ranges:
                    if high >= _ASCII:
                        found.update(code for code in (low, high + 1) if _ASCII < code <= MAX_CODE_POINT)
            case Cat(inner) | Alt(inner):
                stack.extend(inner)
            case Repeat(body):
                stack.append(body)
            case Look():
                raise _NotKnown
    return found | set(_SURROGATES)
