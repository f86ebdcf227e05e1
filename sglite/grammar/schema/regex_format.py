"""The format "regex", as far as a regular language goes: patterns that Python and ECMA-262 both take, with groups
within each other up to DEPTH deep.

No regular language holds all of them. What is left out: deeper groups, named groups and references to groups, flags,
ranges between characters other than those below, look-behind that is more than a row of single characters. So whatever
is written is a regex; not each regex can be written.
"""

from __future__ import annotations

from functools import lru_cache

from sglite.grammar.schema.pattern import parse
from sglite.grammar.schema.pattern_text import Expression, json_regex, lark_regex

DEPTH = 3

_HEX = "[0-9a-fA-F]"
_CODE = rf"x{_HEX}{{2}}|u{_HEX}{{4}}"
_ESCAPE = rf"\\(?:[dDwWsStnrfv]|[^a-zA-Z0-9]|{_CODE})"
_IN_CLASS_ESCAPE = rf"\\(?:[dDwWsSbtnrfv]|[^a-zA-Z0-9]|{_CODE})"
_PLAIN = r"[^\\^$.|?*+()\[{]"
_BRACE = rf"\{{+(?:[^\\^$.|?*+()\[{{}}0-9,]|{_ESCAPE})"  # one that begins no count


def _after(chars: str) -> str:
    """Ranges from each of the characters to it or a later one."""
    return "|".join(f"{char}-[{char}-{chars[-1]}]" for char in chars)


# Ranges of code points that their first digits order.
_CODES = "|".join(
    rf"\\u{low}-\\u{high}"
    for low, high in (
        (f"0{_HEX}{{3}}", f"[1-9a-fA-F]{_HEX}{{3}}"),
        (f"[1-7]{_HEX}{{3}}", f"[89a-fA-F]{_HEX}{{3}}"),
        (f"[89]{_HEX}{{3}}", f"[a-fA-F]{_HEX}{{3}}"),
        (f"00{_HEX}{{2}}", f"0[1-9a-fA-F]{_HEX}{{2}}"),
        (f"00[0-7]{_HEX}", f"00[89a-fA-F]{_HEX}"),
    )
)
_BYTES = rf"\\x[0-7]{_HEX}-\\x[89a-fA-F]{_HEX}|\\x[01]{_HEX}-\\x[2-7]{_HEX}|\\x00-\\x0{_HEX}|\\x00-\\x1{_HEX}"
_RANGE = "|".join(
    [
        *map(_after, ("0123456789", "abcdefghijklmnopqrstuvwxyz", "ABCDEFGHIJKLMNOPQRSTUVWXYZ")),
        r" -~|!-~|!-\/|:-@|A-z",
        _CODES,
        _BYTES,
    ]
)
_MEMBER = rf"(?:{_RANGE}|[&|~]?(?:[^\\\]\[\-&|~]|{_IN_CLASS_ESCAPE}))"
# The first one may not be '^', which would turn the class around.
_CLASS = rf"\[\^?(?:-|{_IN_CLASS_ESCAPE}|{_RANGE}|[^\\\]\[\-&|~^])(?:{_MEMBER})*[&|~]?-?\]"

_COUNTS = "|".join(
    [
        r"[0-9]{1,3},?",
        "|".join(f"{n},[{n}-9]" for n in range(10)),
        r"[0-9],[1-9][0-9]{1,2}|[1-9][0-9],[1-9][0-9]{2}",
        "|".join(f"{n}[0-9],[{n + 1}-9][0-9]|{n}[0-9]{{2}},[{n + 1}-9][0-9]{{2}}" for n in range(1, 9)),
        "|".join(f"{10 * t + n},{t}[{n}-9]" for t in range(1, 10) for n in range(10)),
    ]
)
_REPEAT = rf"(?:(?:[*+?]|\{{(?:{_COUNTS})\}})\??)"
_SINGLE = rf"{_PLAIN}|{_ESCAPE}|{_CLASS}|\."
_LOOK_BEHIND = rf"\(\?<[=!](?:{_SINGLE})*\)"


_OPEN, _CLOSE = r"\((?:\?[:=!])?", r"\)"
_ANCHOR = rf"[|^$]|\\[bB]|{_LOOK_BEHIND}"


def _regexes(depth: int) -> str:
    """The empty alternative is one, so '|' may stand anywhere, as anchors may."""
    atom = f"{_SINGLE}|{_BRACE}"
    if depth:
        atom += f"|{_OPEN}{_regexes(depth - 1)}{_CLOSE}"
    return f"(?:(?:{atom}){_REPEAT}?|{_ANCHOR})*"


REGEX = _regexes(DEPTH)


@lru_cache(maxsize=1)
def regex_expression() -> Expression:
    """The spellings of REGEX, in pieces: as one regex of 42,000 characters it takes the engine 17 ms to read."""
    single, brace, repeat, anchor, begin, end = [
        lark_regex(json_regex(parse(piece))) for piece in (_SINGLE, _BRACE, _REPEAT, _ANCHOR, _OPEN, _CLOSE)
    ]
    found = f"(({single}|{brace}) {repeat}?|{anchor})*"
    for _ in range(DEPTH):
        found = f"(({single}|{brace}|{begin} {found} {end}) {repeat}?|{anchor})*"
    return Expression(f"({found})", None)
