"""How much text one more character may commit a value to: bounds for closing in time, read off the grammar's text.

They err upwards: terminals under `&` and `~`, numbers left to the engine, and rules that count their parts (`name::_`,
each part at most once, or as often as a count asks for) are given more than they need.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

import msgspec

from sglite.grammar.regex_size import regex_size

_UNKNOWN = 24  # bytes of what is not looked into: a number that is left to the engine
_NARROWED = 4  # bytes that an intersection may add to the shortest text of its first operand
_ROUNDS = 64  # of the fixed point; grammars of schemas settle in as many rounds as rules nest without a choice
_CAP = 1 << 20

CONDITION = r"%if\s+\w+\((?:[^()\n]|\((?:[^()\n]|\([^()\n]*\))*\))*\)"  # on a rule's parameter
_LEAST = re.compile(r"ge\([^()]*,(\d+)\)")

_TOKEN = re.compile(
    r"""\s*(?:(?P<string>"(?:[^"\\]|\\.)*"i?)|(?P<regex>/(?:[^/\\]|\\.)+/[a-z]*)|(?P<json>%json\s)|(?P<condition>"""
    + CONDITION
    + r""")"""
    r"""|(?P<name>[A-Za-z_]\w*(?:::(?:\w+(?:\([^)]*\))?))?)|(?P<count>\{\d*,?\d*\}|[?*+])|(?P<mark>[()|&~]))"""
)


class Reach(msgspec.Struct, frozen=True):
    """In bytes, and so at most as many tokens."""

    opening: int  # the shortest text of the longest alternative: a value begun anew
    inside: int  # to the end of a terminal that is begun: a string, a number


@dataclass(slots=True)
class _Choice:
    """Alternatives, each a sequence of parts: a number of bytes, a rule's name, or (parts, least count)."""

    alternatives: list[list[_Part]]
    takes_all: bool = False  # a rule that counts its parts: the shortest way is taken to be all of them
    times: int = 1  # ... so often


@dataclass(slots=True)
class _Repeat:
    body: _Choice
    least: int


_Part = int | str | _Repeat


def regex_reach(pattern: str) -> Reach:
    reach = min(regex_size(pattern).reach, _CAP)
    return Reach(opening=reach, inside=reach)


def lark_reach(grammar: str) -> Reach:
    """Of a grammar that `sglite.grammar.schema` wrote."""
    rules: dict[str, _Choice] = {}
    inside = opening = 0
    for line in grammar.splitlines():
        name, found, body = line.partition(":" if "::_:" not in line else "::_:")
        if not found or not name.strip():
            continue
        choice, terminal_reach = _Reader(body).read()
        choice.takes_all = found == "::_:"
        if choice.takes_all and f"{name.strip()}::" in body:  # it comes again until the count is reached
            choice.times = max((int(least) for least in _LEAST.findall(body)), default=1)
        rules[name.strip()] = choice
        inside = max(inside, terminal_reach)
    shortest = _shortest(rules)
    for choice in rules.values():
        for alternative in choice.alternatives:
            length = sum(_length(part, shortest) for part in alternative)
            opening = max(opening, min(length, _CAP))
        if choice.takes_all:
            opening = max(opening, _choice_length(choice, shortest))
    return Reach(opening=max(opening, inside), inside=inside)


def _shortest(rules: dict[str, _Choice]) -> dict[str, int]:
    shortest = dict.fromkeys(rules, _CAP)
    backwards = list(rules.items())[::-1]  # a rule mostly stands before the ones that it uses
    for _ in range(_ROUNDS):
        changed = False
        for name, choice in backwards:
            length = _choice_length(choice, shortest)
            if length < shortest[name]:
                shortest[name] = length
                changed = True
        if not changed:
            break
    return shortest


def _choice_length(choice: _Choice, shortest: dict[str, int]) -> int:
    lengths = [sum(_length(part, shortest) for part in parts) for parts in choice.alternatives]
    return min(_CAP, choice.times * sum(n for n in lengths if n < _CAP) if choice.takes_all else min(lengths))


def _length(part: _Part, shortest: dict[str, int]) -> int:
    if isinstance(part, int):
        return part
    if isinstance(part, str):
        return shortest.get(part, _UNKNOWN)
    return part.least * _choice_length(part.body, shortest) if part.least else 0


class _Reader:
    """One rule's right side."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._terminal_reach = 0

    def read(self) -> tuple[_Choice, int]:
        return self._choice(), self._terminal_reach

    def _choice(self) -> _Choice:
        alternatives: list[list[_Part]] = [[]]
        narrowed = False
        while (match := _TOKEN.match(self._text, self._at)) is not None:
            self._at = match.end()
            kind, text = match.lastgroup, match[0].strip()
            parts = alternatives[-1]
            if kind == "mark" and text == "(":
                group = _Repeat(self._choice(), 1)
                parts += [] if narrowed else [group]
                narrowed = False
            elif kind == "mark" and text == ")":
                break
            elif kind == "mark" and text == "|":
                alternatives.append([])
            elif kind == "count" and parts:
                parts[-1] = _counted(parts[-1], text)
            elif kind == "mark" and text == "&":
                narrowed = True  # the first operand's length stands for the intersection's
                parts.append(_NARROWED)
            elif kind == "name":
                parts += [] if narrowed else [text.partition("::")[0]]
                narrowed = False
            elif kind in ("string", "regex", "json"):
                length = self._bytes(kind, text)
                if not narrowed:
                    parts.append(length)
                narrowed = False
        return _Choice(alternatives)

    def _bytes(self, kind: str, text: str) -> int:
        if kind == "string":
            return len(json.loads(text.rstrip("i")).encode())
        if kind == "regex":
            size = regex_size(text[1 : text.rindex("/")])
            self._terminal_reach = max(self._terminal_reach, min(size.reach, _CAP))
            return min(size.shortest, _CAP)
        if kind == "json":
            self._at += _json_length(self._text[self._at :])
        return _UNKNOWN


def _counted(part: _Part, count: str) -> _Repeat:
    least = 0 if count in "?*" else 1 if count == "+" else int(re.findall(r"\d+", count + "0")[0])
    if isinstance(part, _Repeat) and part.least == 1:
        return _Repeat(part.body, least)
    return _Repeat(_Choice([[part]]), least)


def _json_length(text: str) -> int:
    _, end = json.JSONDecoder().raw_decode(text.lstrip())
    return len(text) - len(text.lstrip()) + end
