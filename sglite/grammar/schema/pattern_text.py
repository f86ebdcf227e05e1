"""A pattern's syntax tree as text: for the lexer (over the JSON spelling of a string) and for Python's `regex`.

Strings have one spelling in the grammar (values.string_text), so a set of strings is a regular set of
spellings and complements and intersections of such sets are exact. A terminal's expression is written in
llguidance's Lark dialect, which has & and ~ between regexes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from functools import lru_cache

import regex

from sglite.grammar.automaton.classes import complement
from sglite.grammar.schema.pattern import (
    ANY_CHAR,
    MAX_ALTERNATIVES,
    Alt,
    Anchor,
    Cat,
    Chars,
    Look,
    Pattern,
    PatternError,
    Repeat,
    has_look,
    lengths,
    parse,
    split_anchors,
)
from sglite.grammar.spelling import UNIT

MATCH_SECONDS = 0.5

_SHORT = {0x22: '"', 0x5C: "\\", 0x08: "b", 0x09: "t", 0x0A: "n", 0x0C: "f", 0x0D: "r"}
_SPECIAL = (*range(0x20), 0x22, 0x5C)
_SURROGATES = (0xD800, 0xDFFF)
ANY = f"{UNIT}*"
NOTHING = r"[^\x00-\x{10FFFF}]"


class Expression(str):
    """A Lark expression of spellings, with the strings that it spells: those of `tree` (which holds no anchor), or all
    but those. `tree` None: it is not known."""

    __slots__ = ("_strings", "negated", "positive")

    _strings: Pattern | tuple[str, ...] | None
    negated: bool
    positive: str  # the expression of the tree's strings

    def __new__(cls, text: str, strings: Pattern | tuple[str, ...] | None) -> Expression:
        made = super().__new__(cls, text)
        made._strings, made.negated, made.positive = strings, False, text
        return made

    @property
    def tree(self) -> Pattern | None:
        if isinstance(self._strings, tuple):
            return Alt(tuple([Cat(tuple([Chars(((ord(c), ord(c)),)) for c in word])) for word in self._strings]))
        return self._strings

    @property
    def words(self) -> tuple[str, ...] | None:
        """The tree's strings, where they are known one by one."""
        return self._strings if isinstance(self._strings, tuple) else None

    def __invert__(self) -> Expression:
        """All other strings."""
        made = Expression(f"~{self}", self._strings)
        made.negated, made.positive = True, self
        return made


def lark_regex(text: str) -> str:
    """A Rust regex as a Lark literal. The caller keeps letters away from its end: they would be flags."""
    return "/" + text.replace("/", r"\/") + "/" if text else '""'  # two slashes would be a comment


@lru_cache(maxsize=4096)
def pattern_expression(text: str) -> Expression:
    """The spellings, without their quotes, of the strings in which `text` is found. Raises PatternError."""
    tree = parse(text)
    options: list[str] = []
    plain: list[str] = []
    straights: list[Pattern] = []
    for alternative in split_anchors(tree):
        body = alternative.body.parts if isinstance(alternative.body, Cat) else (alternative.body,)
        any_text = Repeat(ANY_CHAR, 0, None)
        parts = (*(() if alternative.at_start else (any_text,)), *body, *(() if alternative.at_end else (any_text,)))
        for straight in _distribute_looks(parts):
            if any(isinstance(part, Look) for part in straight):
                options.append(_look_expression(straight, at_text_start=True))
            else:
                plain.append("".join(json_regex(part, inside=True) for part in straight))
                straights.append(Cat(straight))
    found = None if options else Alt(tuple(straights))
    if plain:
        options.append(lark_regex(plain[0] if len(plain) == 1 else f"(?:{'|'.join(plain)})"))
    if not options:
        return Expression(lark_regex(NOTHING), found)
    return Expression(options[0] if len(options) == 1 else f"({' | '.join(options)})", found)


@lru_cache(maxsize=4096)
def length_expression(least: int, most: int | None) -> Expression:
    """The spellings, without quotes, of the strings with that many characters."""
    return Expression(lark_regex(UNIT + _count(least, most)), Repeat(ANY_CHAR, least, most))


@lru_cache(maxsize=4096)
def pattern_lengths(text: str) -> tuple[int, int | None]:
    """Bounds on the length of a string in which `text` is found."""
    low, high = None, 0
    for alternative in split_anchors(parse(text)):
        least, most = lengths(alternative.body)
        low = least if low is None else min(low, least)
        whole = alternative.at_start and alternative.at_end and most is not None
        high = max(high, most) if whole and high is not None and most is not None else None
    return low or 0, high


def json_regex(tree: Pattern, *, inside: bool = False) -> str:
    """A look-free, anchor-free tree as a Rust regex over JSON spellings. `inside`: as a part of a concatenation."""
    if type(tree) is Chars:
        return _json_class(tree)
    if type(tree) is Cat:
        return "".join([json_regex(part, inside=True) for part in tree.parts])
    if type(tree) is Alt:
        return f"(?:{'|'.join([json_regex(option) for option in tree.options])})"
    if type(tree) is Repeat:
        text = json_regex(tree.body, inside=True)
        single = type(tree.body) is Alt or (type(tree.body) is Chars and _is_single(text))
        return (text if single else f"(?:{text})") + _count(tree.least, tree.most)
    raise PatternError("a look-around or an anchor within a repetition")


def _is_single(text: str) -> bool:
    return len(text) == 1 or text.startswith("(?:") or (text.startswith("[") and text.endswith("]"))


def _count(least: int, most: int | None) -> str:
    if (least, most) == (0, None):
        return "*"
    if (least, most) == (1, None):
        return "+"
    if (least, most) == (0, 1):
        return "?"
    if most is None:
        return f"{{{least},}}"
    return f"{{{least}}}" if least == most else f"{{{least},{most}}}"


@lru_cache(maxsize=4096)
def _json_class(chars: Chars) -> str:
    if chars == ANY_CHAR:
        return UNIT
    if len(chars.ranges) == 1 and not chars.negated and not chars.properties:
        low, high = chars.ranges[0]
        if low == high and 0x20 <= low < _SURROGATES[0] and low not in _SPECIAL:
            return _char_text(low)
    raw = _raw_class(chars)
    escaped = _escaped_members(chars)
    options = ([raw] if raw else []) + _escape_spellings(escaped)
    if not options:
        return NOTHING
    return options[0] if len(options) == 1 else f"(?:{'|'.join(options)})"


def _raw_class(chars: Chars) -> str:
    """The characters of the class that stand for themselves in a JSON string, "" for none."""
    if chars.properties:
        members = "".join(_range_text(low, high) for low, high in _scalars(chars.ranges))
        members += "".join(rf"\{'P' if negated else 'p'}{{{name}}}" for name, negated in chars.properties)
        return rf'[[{"^" if chars.negated else ""}{members}]--["\\\x00-\x1f]]'
    ranges = complement(chars.ranges) if chars.negated else chars.ranges
    excluded = [(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C), _SURROGATES]
    kept = complement((*complement(tuple(ranges)), *excluded))
    if len(kept) == 1 and kept[0][0] == kept[0][1]:
        return _char_text(kept[0][0])
    return f"[{''.join(_range_text(low, high) for low, high in kept)}]" if kept else ""


def _scalars(ranges: tuple[tuple[int, int], ...]) -> list[tuple[int, int]]:
    return complement((*complement(ranges), _SURROGATES))


def _escaped_members(chars: Chars) -> list[int]:
    """The characters of the class that a JSON string escapes."""
    inside: set[int] = set()
    for low, high in chars.ranges:
        inside.update(_SPECIAL[bisect_left(_SPECIAL, low) : bisect_right(_SPECIAL, high)])
    for name, negated in chars.properties:
        inside.update(code for code in _SPECIAL if _property(name, negated).match(chr(code)) is not None)
    return [code for code in _SPECIAL if (code in inside) != chars.negated]


@lru_cache(maxsize=256)
def _property(name: str, negated: bool) -> regex.Pattern[str]:
    try:
        return regex.compile(rf"\{'P' if negated else 'p'}{{{name}}}")
    except regex.error as error:
        raise PatternError(f"unknown Unicode property {name!r}") from error


def _escape_spellings(codes: list[int]) -> list[str]:
    short = "".join(rf"\{_SHORT[c]}" if _SHORT[c] in '"\\' else _SHORT[c] for c in codes if c in _SHORT)
    found = [rf"\\[{short}]"] if short else []
    for high in (0, 1):
        digits = "".join(f"{c & 15:x}" for c in codes if c not in _SHORT and c >> 4 == high)
        if digits:
            found.append(rf"\\u00{high}[{digits}]")
    return found


def _char_text(code: int) -> str:
    char = chr(code)
    return char if char.isascii() and char.isalnum() else rf"\x{{{code:x}}}"


def _range_text(low: int, high: int) -> str:
    return _char_text(low) if low == high else f"{_char_text(low)}-{_char_text(high)}"


def _distribute_looks(parts: tuple[Pattern, ...]) -> list[tuple[Pattern, ...]]:
    """Alternatives that hold a look-around become alternatives of the whole."""
    found: list[tuple[Pattern, ...]] = [()]
    for part in parts:
        if isinstance(part, Alt) and has_look(part):
            options = [option.parts if isinstance(option, Cat) else (option,) for option in part.options]
            inner = [straight for option in options for straight in _distribute_looks(option)]
        elif isinstance(part, Cat) and has_look(part):
            inner = _distribute_looks(part.parts)
        elif isinstance(part, Repeat) and has_look(part) and part.most == 1:
            body = part.body.parts if isinstance(part.body, Cat) else (part.body,)
            inner = _distribute_looks(body) + ([()] if part.least == 0 else [])
        else:
            inner = [(part,)]
        found = [(*before, *after) for before in found for after in inner]
        if len(found) > MAX_ALTERNATIVES:
            raise PatternError("too many alternatives with look-arounds")
    return found


def _look_expression(parts: tuple[Pattern, ...], *, at_text_start: bool) -> str:
    """A whole remainder of the text, given as parts up to the text's end, as a Lark expression."""
    where = next((i for i, part in enumerate(parts) if isinstance(part, Look)), None)
    if where is None:
        return lark_regex("".join(json_regex(part, inside=True) for part in parts)) if parts else '""'
    look, left, right = parts[where], parts[:where], parts[where + 1 :]
    assert isinstance(look, Look)
    rest = _look_expression(right, at_text_start=False)
    before = lark_regex("".join(json_regex(part, inside=True) for part in left)) if left else '""'
    condition = _condition(look, nothing_before=at_text_start and not left)
    wanted = f"~({condition})" if look.negated else condition
    if look.ahead:
        return f"({before} ({rest} & {wanted}))"
    # Seen from here, only `left` lies behind; it must be all that the look can reach.
    reach = lengths(look.body)[1]
    if not at_text_start and (reach is None or sum(lengths(part)[0] for part in left) < reach):
        raise PatternError("a look-behind that reaches over another look-around")
    return f"(({before} & {wanted}) {rest})"


def _condition(look: Look, *, nothing_before: bool) -> str:
    any_text = Repeat(ANY_CHAR, 0, None)
    options: list[str] = []
    for alternative in split_anchors(look.body):
        if (look.ahead and alternative.at_start and not nothing_before) or (not look.ahead and alternative.at_end):
            raise PatternError("an anchor within a look-around")
        body = alternative.body.parts if isinstance(alternative.body, Cat) else (alternative.body,)
        free = not (alternative.at_end if look.ahead else alternative.at_start)
        parts = (*body, any_text) if look.ahead and free else (any_text, *body) if free else body
        for straight in _distribute_looks(parts):
            if any(isinstance(part, Look) for part in straight) and not look.ahead:
                raise PatternError("a look-around within a look-behind")
            options.append(_look_expression(straight, at_text_start=False))
    return f"({' | '.join(options or [lark_regex(NOTHING)])})"


@lru_cache(maxsize=4096)
def matcher(text: str) -> regex.Pattern[str]:
    """`text` for Python, with ECMA's meaning of classes and anchors. Raises PatternError."""
    try:
        return regex.compile(_python(parse(text)))
    except regex.error as error:
        raise PatternError(str(error)) from error


def _python_char(code: int) -> str:
    char = chr(code)
    return char if char.isascii() and char.isalnum() else f"\\U{code:08x}"


def found_in(text: str, value: str) -> bool:
    """Whether the pattern `text` is found in `value`. Raises PatternError (also where it takes too long)."""
    try:
        return matcher(text).search(value, timeout=MATCH_SECONDS) is not None
    except TimeoutError as error:
        raise PatternError(f"matching takes over {MATCH_SECONDS} s") from error


def _python(tree: Pattern) -> str:
    match tree:
        case Chars(ranges, negated, properties):
            if tree == ANY_CHAR or (negated and not ranges and not properties):
                return r"(?s:.)"
            if negated and not properties:  # `regex` 2026.11 joins negated sets of alternatives wrongly
                ranges, negated = tuple(complement(ranges)), False
            if len(ranges) == 1 and not negated and not properties and ranges[0][0] == ranges[0][1]:
                return _python_char(ranges[0][0])
            members = "".join([f"{_python_char(low)}-{_python_char(high)}" for low, high in ranges])
            members += "".join(rf"\{'P' if n else 'p'}{{{name}}}" for name, n in properties)
            return f"[{'^' if negated else ''}{members}]" if members else r"(?!)"
        case Cat(parts):
            return "".join(_python(part) for part in parts)
        case Alt(options):
            return f"(?:{'|'.join(_python(option) for option in options)})"
        case Repeat(body, least, most):
            return f"(?:{_python(body)}){{{least},{'' if most is None else most}}}"
        case Anchor(kind):
            return r"\A" if kind == "^" else r"\Z"
        case Look(body, ahead, negated):
            return f"(?{'' if ahead else '<'}{'!' if negated else '='}{_python(body)})"
