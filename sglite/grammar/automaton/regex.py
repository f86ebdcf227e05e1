"""Regular expressions over bytes that are followed by derivatives (Brzozowski 1964): what is left of an expression
after a byte is again an expression, and equal rests are the same object. So an expression is its own state.

    r = regexes.parse(r"[0-9]+")      after b"1":  [0-9]*      after b"12":  [0-9]*, the same object

Sequences, alternatives, bounded repeats, intersections and complements, with the simplifications that make the rests
of an expression few: sequences lean to the right, alternatives and intersections are sets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import reduce
from operator import and_, or_
from typing import Any

from sglite.grammar.automaton.classes import EVERYTHING, NAMED, NO_NEW_LINE, Ranges, complement
from sglite.grammar.automaton.utf8 import byte_sequences
from sglite.grammar.spelling import UNIT

ALL_BYTES = (1 << 256) - 1


class TooManyStates(Exception):
    """The expressions of one grammar have more different rests than are worth remembering."""


class NotTold(TooManyStates):
    """Whether an expression with & or ~ has any text would take too long to tell."""


class Regex:
    """`kind` and `parts`: "set" (bytes as a bit set), "cat" (head, tail), "or" / "and" (a set of two or more), "not",
    "repeat" (body, least, most or None), "empty" (the empty text). Made by `Regexes` alone; equal ones are one."""

    __slots__ = ("alive", "classes", "first", "kind", "nullable", "number", "parts", "rests")

    def __init__(self, kind: str, parts: tuple[Any, ...], nullable: bool, number: int) -> None:
        self.kind = kind
        self.parts = parts
        self.nullable = nullable  # it takes the empty text
        self.first = _first_bytes(kind, parts)  # bit set: no text begins with another byte
        self.number = number
        self.rests: dict[int, Regex] = {}  # by byte; what was asked for
        self.alive: bool | None = True if nullable or _is_plain(kind, parts) else None  # see emptiness.py
        self.classes: tuple[int, ...] | None = None  # the same


def _is_plain(kind: str, parts: tuple[Any, ...]) -> bool:
    """Known to have a text, as whatever is made without & and ~ and is not `nothing` has."""
    match kind:
        case "set":
            return parts[0] != 0
        case "cat":
            return bool(parts[0].alive and parts[1].alive)
        case "or":
            return any(part.alive for part in parts)
        case "repeat":
            return bool(parts[0].alive)
        case _:
            return False


def _first_bytes(kind: str, parts: tuple[Any, ...]) -> int:
    match kind:
        case "set":
            return parts[0]
        case "cat":
            head, tail = parts
            return head.first | tail.first if head.nullable else head.first
        case "or":
            return reduce(or_, (part.first for part in parts))
        case "and":
            return reduce(and_, (part.first for part in parts))
        case "repeat":
            return parts[0].first
        case "not":
            return ALL_BYTES
        case _:
            return 0


class Regexes:
    """The expressions of one grammar. Raises TooManyStates where there would be more than `most`. `pause` is called now
    and then, while it is set."""

    def __init__(self, most: int, pause: Callable[[], None] | None = None) -> None:
        self.most = most
        self.pause = pause
        self._known: dict[tuple[object, ...], Regex] = {}
        self._parsed: dict[str, Regex] = {}
        self.not_told: set[int] = set()  # numbers of those of which `emptiness` gave up
        self.nothing = self._make("set", (0,), nullable=False)  # no text at all
        self.nothing.alive = False
        self.empty = self._make("empty", (), nullable=True)
        self.everything = self._make("not", (self.nothing,), nullable=True)

    def _make(self, kind: str, parts: tuple[Any, ...], *, nullable: bool) -> Regex:
        if self.pause is not None:
            self.pause()
        key = (kind, *parts)
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= self.most:
                raise TooManyStates
            found = self._known[key] = Regex(kind, parts, nullable, len(self._known))
        return found

    def __len__(self) -> int:
        return len(self._known)

    # -- constructors

    def bytes_of(self, members: int) -> Regex:
        """One byte of the bit set `members`."""
        return self._make("set", (members,), nullable=False)

    def text(self, data: bytes) -> Regex:
        return self.sequence(self.bytes_of(1 << byte) for byte in data)

    def sequence(self, parts: Iterable[Regex]) -> Regex:
        found = self.empty
        for part in reversed(list(parts)):
            found = self.cat(part, found)
        return found

    def cat(self, head: Regex, tail: Regex) -> Regex:
        if head is self.nothing or tail is self.nothing:
            return self.nothing
        if head is self.empty:
            return tail
        if tail is self.empty:
            return head
        if head.kind == "cat":
            first, second = head.parts
            return self.cat(first, self.cat(second, tail))
        return self._make("cat", (head, tail), nullable=head.nullable and tail.nullable)

    def union(self, parts: Iterable[Regex]) -> Regex:
        members: dict[int, Regex] = {}
        byte_set = 0
        for part in parts:
            for one in part.parts if part.kind == "or" else (part,):
                if one is self.everything:
                    return one
                if one.kind == "set":
                    byte_set |= one.parts[0]
                else:
                    members[one.number] = one
        if byte_set:
            one = self.bytes_of(byte_set)
            members[one.number] = one
        if len(members) < 2:
            return next(iter(members.values()), self.nothing)
        ordered = tuple(members[number] for number in sorted(members))
        return self._make("or", ordered, nullable=any(one.nullable for one in ordered))

    def both(self, parts: Iterable[Regex]) -> Regex:
        members: dict[int, Regex] = {}
        for part in parts:
            for one in part.parts if part.kind == "and" else (part,):
                if one is self.nothing:
                    return one
                if one is not self.everything:
                    members[one.number] = one
        if len(members) < 2:
            return next(iter(members.values()), self.everything)
        ordered = tuple(members[number] for number in sorted(members))
        return self._make("and", ordered, nullable=all(one.nullable for one in ordered))

    def complement(self, part: Regex) -> Regex:
        if part.kind == "not":
            return part.parts[0]
        return self._make("not", (part,), nullable=not part.nullable)

    def repeat(self, body: Regex, least: int, most: int | None) -> Regex:
        if most == 0 or body is self.empty:
            return self.empty
        if body is self.nothing:
            return self.empty if least == 0 else body
        if (least, most) == (1, 1):
            return body
        if body.nullable:
            least = 0
        return self._make("repeat", (body, least, most), nullable=least == 0)

    # -- derivatives

    def rest(self, regex: Regex, byte: int) -> Regex:
        """What may follow `byte` in the texts of `regex` that begin with it."""
        found = regex.rests.get(byte)
        if found is None:
            found = self._rest(regex, byte) if regex.first >> byte & 1 else self.nothing
            regex.rests[byte] = found
        return found

    def _rest(self, regex: Regex, byte: int) -> Regex:
        parts = regex.parts
        match regex.kind:
            case "set":
                return self.empty if parts[0] >> byte & 1 else self.nothing
            case "cat":
                head, tail = parts
                first = self.cat(self.rest(head, byte), tail)
                return self.union((first, self.rest(tail, byte))) if head.nullable else first
            case "or":
                return self.union([self.rest(part, byte) for part in parts if part.first >> byte & 1])
            case "and":
                return self.both([self.rest(part, byte) for part in parts])
            case "not":
                return self.complement(self.rest(parts[0], byte))
            case "repeat":
                body, least, most = parts
                left = self.repeat(body, max(least - 1, 0), None if most is None else most - 1)
                return self.cat(self.rest(body, byte), left)
            case _:
                return self.nothing

    def follow(self, regex: Regex, data: bytes) -> Regex:
        for byte in data:
            regex = self.rest(regex, byte)
        return regex

    # -- Rust syntax, as far as our front end writes it

    def parse(self, text: str) -> Regex:
        """Raises ValueError for anything that is not surely understood. Remembers."""
        found = self._parsed.get(text)
        if found is None:
            found = self._parsed[text] = self._parse(text)
        return found

    def _parse(self, text: str) -> Regex:
        parser = _Parser(self, text)
        found = parser.alternatives()
        if not parser.over:
            raise ValueError(f"unexpected {text[parser.at]!r} in the expression")
        return found


_ESCAPED = {"n": 10, "r": 13, "t": 9, "f": 12}
_LITERAL_ESCAPES = frozenset("\\.+*?()|[]{}^$#&-~/\"' ")
_SPECIAL = frozenset(".^$")


class _Parser:
    def __init__(self, regexes: Regexes, text: str) -> None:
        self.regexes = regexes
        self.text = text
        self.at = 0
        self.any_char = NO_NEW_LINE  # what a point stands for

    @property
    def over(self) -> bool:
        return self.at >= len(self.text)

    def _next(self) -> str:
        if self.over:
            raise ValueError("the expression ends early")
        self.at += 1
        return self.text[self.at - 1]

    def _take(self, text: str) -> bool:
        if self.text.startswith(text, self.at):
            self.at += len(text)
            return True
        return False

    def alternatives(self) -> Regex:
        options = [self._sequence()]
        while self._take("|"):
            options.append(self._sequence())
        return self.regexes.union(options) if len(options) > 1 else options[0]

    def _sequence(self) -> Regex:
        parts: list[Regex] = []
        while not self.over and self.text[self.at] not in "|)":
            parts.append(self._counted(self._atom()))
        return self.regexes.sequence(parts)

    def _counted(self, atom: Regex) -> Regex:
        counts = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        while not self.over:
            sign = self.text[self.at]
            if sign in counts:
                self.at += 1
                atom = self.regexes.repeat(atom, *counts[sign])
            elif sign == "{":
                self.at += 1
                atom = self.regexes.repeat(atom, *self._bounds())
            else:
                break
        return atom

    def _bounds(self) -> tuple[int, int | None]:
        end = self.text.index("}", self.at)
        least, comma, most = self.text[self.at : end].partition(",")
        self.at = end + 1
        return int(least), (int(most) if most else None) if comma else int(least)

    def _atom(self) -> Regex:
        if self.text.startswith(UNIT, self.at) and self.text != UNIT:
            self.at += len(UNIT)
            return self.regexes.parse(UNIT)  # most of what there is to read
        if self._take("(?:"):
            return self._group(self.any_char)
        if self._take("(?s:"):
            return self._group(EVERYTHING)
        if self.text.startswith("(", self.at) and not self.text.startswith("(?", self.at):
            self.at += 1
            return self._group(self.any_char)
        char = self._next()
        if char == "[":
            return self._char_class()
        if char == ".":
            return self._chars(self.any_char)
        if char == "\\":
            return self._chars(self._escape())
        if char in _SPECIAL or char in "()*+?{}]":
            raise ValueError(f"unexpected {char!r} in the expression")
        return self._chars([(ord(char), ord(char))])

    def _group(self, any_char: Ranges) -> Regex:
        outside, self.any_char = self.any_char, any_char
        inner = self.alternatives()
        self.any_char = outside
        if not self._take(")"):
            raise ValueError("a group is not closed")
        return inner

    def _escape(self) -> Ranges:
        if self.text[self.at : self.at + 1] in NAMED:
            return NAMED[self._next()]
        code = self._escaped_char()
        return [(code, code)]

    def _escaped_char(self) -> int:
        char = self._next()
        if char == "x" and self._take("{"):
            end = self.text.index("}", self.at)
            code = int(self.text[self.at : end], 16)
            self.at = end + 1
            return code
        if char == "x":
            self.at += 2
            return int(self.text[self.at - 2 : self.at], 16)
        if char in _ESCAPED:
            return _ESCAPED[char]
        if char in _LITERAL_ESCAPES:
            return ord(char)
        raise ValueError(f"unexpected \\{char} in the expression")

    def _char_class(self) -> Regex:
        negated = self._take("^")
        ranges: Ranges = []
        while not self._take("]"):
            if self.text[self.at : self.at + 1] == "\\" and self.text[self.at + 1 : self.at + 2] in NAMED:
                self.at += 1
                ranges += self._escape()
                if self.text.startswith("-", self.at):
                    raise ValueError("a class as the end of a range")
                continue
            first = self._class_char()
            last = first
            if self.text.startswith("-", self.at) and not self.text.startswith("-]", self.at):
                self.at += 1
                last = self._class_char()
            ranges.append((first, last))
        if not ranges:
            raise ValueError("an empty class")
        return self._chars(complement(ranges) if negated else ranges)

    def _class_char(self) -> int:
        char = self._next()
        if char == "\\":
            return self._escaped_char()
        if char in "[&~" or (char == "-" and not self.text.startswith("]", self.at)):
            raise ValueError(f"unexpected {char!r} in a class")
        return ord(char)

    def _chars(self, ranges: Ranges) -> Regex:
        regexes = self.regexes
        options = [
            regexes.sequence(regexes.bytes_of(_span(first, last)) for first, last in sequence)
            for low, high in ranges
            for sequence in byte_sequences(low, high)
        ]
        return regexes.union(options)


def _span(first: int, last: int) -> int:
    """The bit set of the bytes first .. last."""
    return (1 << (last + 1)) - (1 << first)
