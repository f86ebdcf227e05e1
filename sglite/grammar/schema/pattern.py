"""The regular expressions of JSON schema (ECMA-262, without back references) as a syntax tree.

Steps: `parse` reads the text, `split_anchors` turns ^ and $ into flags of whole alternatives, `lengths`
bounds how many characters can match.
"""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import product
from typing import final

import msgspec

from sglite.grammar.automaton.classes import complement

MAX_CODE_POINT = 0x10FFFF
MAX_ALTERNATIVES = 64
MAX_REPEAT = 100_000


class PatternError(ValueError):
    """The pattern cannot be parsed, or uses what no regular language holds. The text says which."""


@final
class Chars(msgspec.Struct, frozen=True, cache_hash=True):
    """One character in `ranges` (inclusive code points) or Unicode `properties` (name, negated), or in none of them."""

    ranges: tuple[tuple[int, int], ...]
    negated: bool = False
    properties: tuple[tuple[str, bool], ...] = ()


@final
class Cat(msgspec.Struct, frozen=True):
    parts: tuple[Pattern, ...]


@final
class Alt(msgspec.Struct, frozen=True):
    options: tuple[Pattern, ...]


@final
class Repeat(msgspec.Struct, frozen=True):
    body: Pattern
    least: int
    most: int | None


@final
class Anchor(msgspec.Struct, frozen=True):
    kind: str  # "^" or "$"


@final
class Look(msgspec.Struct, frozen=True):
    """A look-around: `body` must (not) match ahead of or behind this point."""

    body: Pattern
    ahead: bool
    negated: bool


Pattern = Chars | Cat | Alt | Repeat | Anchor | Look
EMPTY = Cat(())

_DIGIT = ((0x30, 0x39),)
_WORD = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACE = (
    (0x09, 0x0D),
    (0x20, 0x20),
    (0xA0, 0xA0),
    (0x1680, 0x1680),
    (0x2000, 0x200A),
    (0x2028, 0x2029),
    (0x202F, 0x202F),
    (0x205F, 0x205F),
    (0x3000, 0x3000),
    (0xFEFF, 0xFEFF),
)
_NEWLINES = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
ANY_CHAR = Chars((), negated=True)
_LITERALS = [Chars(((code, code),)) for code in range(128)]
_CONTROL = {"t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D, "0": 0x00}
_QUANTIFIER = re.compile(r"\{(\d+)(,(\d*))?\}")


@lru_cache(maxsize=1024)
def parse(text: str) -> Pattern:
    """Raises PatternError."""
    parser = _Parser(text)
    tree = parser.alternation()
    if parser.at < len(text):
        raise PatternError(f"unmatched {text[parser.at]!r}")
    return tree


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.depth = 0
        self.fold = False  # (?i)

    def peek(self, width: int = 1) -> str:
        return self.text[self.at : self.at + width]

    def take(self, literal: str) -> bool:
        if self.text.startswith(literal, self.at):
            self.at += len(literal)
            return True
        return False

    def alternation(self) -> Pattern:
        self.depth += 1
        if self.depth > 60:
            raise PatternError("groups are nested too deep")
        options = [self.sequence()]
        while self.take("|"):
            options.append(self.sequence())
        self.depth -= 1
        return options[0] if len(options) == 1 else Alt(tuple(options))

    def sequence(self) -> Pattern:
        parts: list[Pattern] = []
        text, end = self.text, len(self.text)
        while self.at < end and (char := text[self.at]) not in "|)":
            part = self.atom(char)
            if self.at < end and text[self.at] in "*+?{":
                part = self.quantified(part)
            if type(part) is Cat:
                parts += part.parts
            else:
                parts.append(part)
        return parts[0] if len(parts) == 1 else Cat(tuple(parts))

    def quantified(self, atom: Pattern) -> Pattern:
        least, most = 1, 1
        counted = _QUANTIFIER.match(self.text, self.at)
        if self.take("*"):
            least, most = 0, None
        elif self.take("+"):
            least, most = 1, None
        elif self.take("?"):
            least, most = 0, 1
        elif counted:
            self.at = counted.end()
            least = int(counted[1])
            most = least if counted[2] is None else int(counted[3]) if counted[3] else None
        else:
            return atom
        if max(least, most or 0) > MAX_REPEAT:
            raise PatternError(f"a count is above {MAX_REPEAT}")
        if most is not None and most < least:
            raise PatternError("the counts of {} are out of order")
        self.take("?")  # lazy or greedy: the same language
        if self.peek() and self.peek() in "*+" or _QUANTIFIER.match(self.text, self.at):
            raise PatternError("nothing to repeat")
        if isinstance(atom, Anchor | Look):
            return atom if least else EMPTY
        return Repeat(atom, least, most)

    def atom(self, char: str) -> Pattern:
        """`char`: the one here."""
        self.at += 1
        if char not in "^$.[(\\*+?":
            return self.literal(ord(char))
        match char:
            case "^" | "$":
                return Anchor(char)
            case ".":
                return Chars(_NEWLINES, negated=True)
            case "[":
                return self.char_class()
            case "(":
                return self.group()
            case "\\":
                return self.escape()
        raise PatternError(f"nothing to repeat before {char!r}")

    def literal(self, code: int) -> Chars:
        if self.fold:
            return _folded(((code, code),))
        return _LITERALS[code] if code < len(_LITERALS) else Chars(((code, code),))

    def group(self) -> Pattern:
        if self.take("?:"):
            return self.close(self.alternation())
        for opening, ahead, negated in (
            ("?=", True, False),
            ("?!", True, True),
            ("?<=", False, False),
            ("?<!", False, True),
        ):
            if self.take(opening):
                return Look(self.close(self.alternation()), ahead, negated)
        if self.take("?i)"):
            self.fold = True
            return EMPTY
        if self.take("?i:"):
            before, self.fold = self.fold, True
            inside = self.close(self.alternation())
            self.fold = before
            return inside
        named = re.compile(r"\?P?<[A-Za-z_$][\w$]*>").match(self.text, self.at)
        if named:
            self.at = named.end()
        elif self.peek() == "?":
            raise PatternError(f"unknown group ({self.peek(3)}")
        return self.close(self.alternation())

    def close(self, inside: Pattern) -> Pattern:
        if not self.take(")"):
            raise PatternError("a group is not closed")
        return inside

    def escape(self) -> Pattern:
        char = self.peek()
        if char in ("b", "B"):
            self.at += 1
            word = Chars(_WORD)
            after_word = Cat((Look(word, False, False), Look(word, True, char == "b")))
            after_other = Cat((Look(word, False, True), Look(word, True, char == "B")))
            return Alt((after_word, after_other))
        if char and char in "AzZ":
            self.at += 1
            return Anchor("^" if char == "A" else "$")
        if char and (char in "123456789" or (char == "k" and self.peek(2) == "k<")):
            raise PatternError("back references are not regular")
        found = self.class_escape()
        if isinstance(found, int):
            return self.literal(found)
        return found

    def class_escape(self) -> Chars | int:
        """What follows a backslash, inside or outside of brackets: a set or one code point."""
        if self.at >= len(self.text):
            raise PatternError("a backslash at the end")
        char = self.peek()
        self.at += 1
        match char:
            case "d" | "D":
                return Chars(_DIGIT, negated=char == "D")
            case "w" | "W":
                return Chars(_WORD, negated=char == "W")
            case "s" | "S":
                return Chars(_SPACE, negated=char == "S")
            case "p" | "P":
                return self.property(negated=char == "P")
            case "x" | "u":
                return self.hexadecimal(char)
            case "c" if self.peek().isalpha():
                self.at += 1
                return ord(self.text[self.at - 1]) % 32
        return _CONTROL.get(char, ord(char))

    def hexadecimal(self, kind: str) -> int:
        braced = re.compile(r"\{([0-9a-fA-F]{1,6})\}").match(self.text, self.at)
        plain = re.compile("[0-9a-fA-F]{2}" if kind == "x" else "[0-9a-fA-F]{4}").match(self.text, self.at)
        if braced:
            self.at = braced.end()
            return int(braced[1], 16)
        if not plain:
            return ord(kind)
        self.at = plain.end()
        code = int(plain[0], 16)
        pair = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})").match(self.text, self.at)
        if 0xD800 <= code < 0xDC00 and pair:
            self.at = pair.end()
            return 0x10000 + ((code - 0xD800) << 10) + int(pair[1], 16) - 0xDC00
        return code

    def property(self, *, negated: bool) -> Chars:
        name = re.compile(r"\{([\w=]+)\}").match(self.text, self.at)
        if not name:
            raise PatternError("\\p needs a property in braces")
        self.at = name.end()
        wanted = name[1].split("=")[-1]
        if "=" in name[1] and not name[1].startswith(("gc=", "General_Category=", "Script=", "sc=")):
            raise PatternError(f"unknown Unicode property {name[1]!r}")
        return Chars((), properties=((wanted, negated),))

    def char_class(self) -> Chars:
        negated = self.take("^")
        ranges: list[tuple[int, int]] = []
        properties: list[tuple[str, bool]] = []
        while not self.take("]"):
            first = self.class_member()
            if self.text.startswith("-", self.at) and self.peek(2) not in ("-", "-]"):
                self.at += 1
                last = self.class_member()
                if isinstance(first, int) and isinstance(last, int):
                    if last < first:
                        raise PatternError("a range in brackets is out of order")
                    ranges.append((first, last))
                    continue
                ranges.append((0x2D, 0x2D))
                _extend(ranges, properties, last)
            _extend(ranges, properties, first)
        found = Chars(tuple(ranges), negated, tuple(properties))
        return _folded(found.ranges, negated, found.properties) if self.fold else found

    def class_member(self) -> Chars | int:
        if self.at >= len(self.text):
            raise PatternError("a bracket is not closed")
        char = self.text[self.at]
        self.at += 1
        if char != "\\":
            return ord(char)
        if self.take("b"):
            return 0x08
        return self.class_escape()


def _extend(ranges: list[tuple[int, int]], properties: list[tuple[str, bool]], member: Chars | int) -> None:
    if isinstance(member, int):
        ranges.append((member, member))
        return
    ranges.extend(complement(member.ranges) if member.negated else member.ranges)
    properties.extend(member.properties)


def _folded(
    ranges: tuple[tuple[int, int], ...], negated: bool = False, properties: tuple[tuple[str, bool], ...] = ()
) -> Chars:
    more = list(ranges)
    for low, high in ranges:
        for first, last, shift in ((0x41, 0x5A, 32), (0x61, 0x7A, -32)):
            if max(low, first) <= min(high, last):
                more.append((max(low, first) + shift, min(high, last) + shift))
    return Chars(tuple(more), negated, properties)


class Alternative(msgspec.Struct, frozen=True):
    """One way to match: `body` holds no anchor; it begins (ends) where the text does if `at_start` (`at_end`)."""

    body: Pattern
    at_start: bool
    at_end: bool


def split_anchors(tree: Pattern) -> list[Alternative]:
    """The pattern as a union of alternatives without anchors inside. Raises PatternError where that is not possible."""
    if isinstance(tree, Anchor):
        return [Alternative(EMPTY, tree.kind == "^", tree.kind == "$")]
    if not _has_anchor(tree):
        return [Alternative(tree, False, False)]
    if isinstance(tree, Alt):
        found = [alternative for option in tree.options for alternative in split_anchors(option)]
    elif isinstance(tree, Cat):
        pieces = [split_anchors(part) for part in tree.parts]
        total = 1
        for piece in pieces:
            total *= len(piece)
        if total > MAX_ALTERNATIVES:
            raise PatternError("too many alternatives with anchors")
        found = [joined for combination in product(*pieces) if (joined := _join(combination)) is not None]
    elif isinstance(tree, Repeat):
        found = _split_repeat(tree)
    else:
        raise PatternError("an anchor within a look-around")
    if len(found) > MAX_ALTERNATIVES:
        raise PatternError("too many alternatives with anchors")
    return found


def _split_repeat(tree: Repeat) -> list[Alternative]:
    """Rounds with ^ only come first, rounds with $ only last: S? P* E?, where P has neither.

    A round beside an anchor that should be there more often than once is empty, so only counts up to 1 matter.
    """
    if tree.most == 0:
        return [Alternative(EMPTY, False, False)]
    options = split_anchors(tree.body)
    if tree.most == 1:
        return options if tree.least else [*options, Alternative(EMPTY, False, False)]
    if tree.least > 1 or tree.most is not None:
        raise PatternError("an anchor is repeated a number of times")
    plain = [o.body for o in options if not o.at_start and not o.at_end]
    middle = Repeat(plain[0] if len(plain) == 1 else Alt(tuple(plain)), 0, None) if plain else EMPTY
    firsts = [o for o in options if o.at_start and not o.at_end]
    lasts = [o for o in options if o.at_end and not o.at_start]
    found = [o for o in options if o.at_start and o.at_end]
    if tree.least == 0 or plain:
        found.append(
            Alternative(Repeat(middle.body, tree.least, None) if isinstance(middle, Repeat) else EMPTY, False, False)
        )
    found.extend(Alternative(Cat((first.body, middle)), True, False) for first in firsts)
    found.extend(Alternative(Cat((middle, last.body)), False, True) for last in lasts)
    found.extend(Alternative(Cat((first.body, middle, last.body)), True, True) for first in firsts for last in lasts)
    return found


def _join(pieces: tuple[Alternative, ...]) -> Alternative | None:
    """Concatenation: what stands before a ^ or after a $ must be empty. None: cannot match."""
    starts = [i for i, piece in enumerate(pieces) if piece.at_start]
    ends = [i for i, piece in enumerate(pieces) if piece.at_end]
    bodies = [piece.body for piece in pieces]
    first, last = (starts[-1] if starts else 0), (ends[0] if ends else len(pieces) - 1)
    for i, body in enumerate(bodies):
        if i < first or i > last:
            empty = _emptied(body)
            if empty is None:
                return None
            bodies[i] = empty
    parts = [part for body in bodies for part in (body.parts if isinstance(body, Cat) else (body,))]
    return Alternative(parts[0] if len(parts) == 1 else Cat(tuple(parts)), bool(starts), bool(ends))


def _emptied(tree: Pattern) -> Pattern | None:
    """What is left of a pattern that has to match no character: its look-arounds. None: it cannot."""
    match tree:
        case Chars():
            return None
        case Cat(parts):
            empty = [_emptied(part) for part in parts]
            return None if None in empty else Cat(tuple(part for part in empty if part is not None and part != EMPTY))
        case Alt(options):
            found = tuple(option for option in map(_emptied, options) if option is not None)
            return EMPTY if EMPTY in found else Alt(found) if found else None
        case Repeat(body, least):
            return EMPTY if least == 0 else _emptied(body)
    return tree


def _has_anchor(tree: Pattern) -> bool:
    return _holds(tree, Anchor)


def has_look(tree: Pattern) -> bool:
    return _holds(tree, Look)


def _holds(tree: Pattern, kind: type[Pattern]) -> bool:
    """Whether a node of the kind is in it, outside of look-arounds."""
    stack = [tree]
    while stack:
        here = stack.pop()
        if type(here) is Cat:
            stack += here.parts
        elif type(here) is Alt:
            stack += here.options
        elif type(here) is Repeat:
            stack.append(here.body)
        elif type(here) is kind:
            return True
    return False


def lengths(tree: Pattern) -> tuple[int, int | None]:
    """The least and most characters that can match (None: no bound)."""
    if type(tree) is Chars:
        return 1, 1
    if type(tree) is Cat:
        least, most = 0, 0
        for part in tree.parts:
            low, high = (1, 1) if type(part) is Chars else lengths(part)
            least += low
            most = None if most is None or high is None else most + high
        return least, most
    if type(tree) is Alt:
        pairs = [lengths(option) for option in tree.options]
        highs = [high for _, high in pairs]
        return min(low for low, _ in pairs), None if None in highs else max(h for h in highs if h is not None)
    if type(tree) is Repeat:
        low, high = lengths(tree.body)
        most = tree.most
        return low * tree.least, 0 if high == 0 else None if high is None or most is None else high * most
    return 0, 0
