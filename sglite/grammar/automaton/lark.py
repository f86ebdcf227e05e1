"""The Lark text that our schema front end writes, read back: rules over terminals, terminals as expressions.

Only what `sglite.grammar.schema.grammar` writes is understood. Anything else (parameters, conditions, special tokens,
nested JSON schemas, flags) raises NotRead, and the grammar is followed by its engine alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from sglite.grammar.automaton.regex import ALL_BYTES, Regex, Regexes

_TOKEN = re.compile(
    r"""\s*(?:
        (?P<string>"(?:[^"\\]|\\.)*")
      | (?P<regex>/(?:[^/\\\n]|\\.)+/(?![a-z]))
      | (?P<name>[A-Za-z_]\w*)
      | (?P<count>\{\d+(?:,\d*)?\})
      | (?P<sign>[()|&~*+?])
    )""",
    re.VERBOSE,
)


_LAZY = "[lazy]"


class NotRead(Exception):
    """The grammar holds something that is not followed here."""


@dataclass(frozen=True, slots=True)
class RuleRef:
    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """`least` to `most` (None: any number) times one of the options."""

    options: tuple[Sequence, ...]
    least: int
    most: int | None


Symbol = Regex | RuleRef | Group
Sequence = tuple[Symbol, ...]
Rules = dict[str, tuple[Sequence, ...]]


def read(text: str, regexes: Regexes) -> Rules:
    """The rules by name; the first one is "start". Raises NotRead, TooManyStates."""
    bodies: dict[str, str] = {}
    lazy: set[str] = set()
    for line in text.splitlines():
        if not line.strip():
            continue
        name, colon, body = line.partition(":")
        if name.endswith(_LAZY):
            name = name.removesuffix(_LAZY)
            lazy.add(name)
        if not colon or not re.fullmatch(r"[A-Za-z_]\w*", name) or name in bodies:
            raise NotRead(line[:60])
        bodies[name] = body
    if "start" not in bodies:
        raise NotRead("no start")
    reader = _Reader(bodies, regexes)
    rules = {name: reader.rule(body) for name, body in bodies.items() if not _is_terminal(name)}
    for name in lazy:
        rules[name] = ((_shortest(rules.get(name), regexes),),)
    return rules


def _shortest(options: tuple[Sequence, ...] | None, regexes: Regexes) -> Regex:
    """A lazy terminal ends as soon as it can: none of its texts begins with another one."""
    if options is None or len(options) != 1 or len(options[0]) != 1 or not isinstance(options[0][0], Regex):
        raise NotRead("lazy, and not one expression")
    whole = options[0][0]
    more = regexes.repeat(regexes.bytes_of(ALL_BYTES), 1, None)
    return regexes.both((whole, regexes.complement(regexes.cat(whole, more))))


def _is_terminal(name: str) -> bool:
    """Also a rule that is nothing but one terminal."""
    return name[0].isupper() or (name[0] == "t" and name[1:].isdecimal())


class _Reader:
    def __init__(self, bodies: dict[str, str], regexes: Regexes) -> None:
        self._bodies = bodies
        self._regexes = regexes
        self._terminals: dict[str, Regex] = {}

    def rule(self, body: str) -> tuple[Sequence, ...]:
        tokens = _tokens(body, self._regexes.pause)
        options = self._options(tokens)
        if tokens:
            raise NotRead(body[:60])
        return options

    def _options(self, tokens: list[tuple[str, str]]) -> tuple[Sequence, ...]:
        options = [self._sequence(tokens)]
        while tokens and tokens[-1][1] == "|":
            tokens.pop()
            options.append(self._sequence(tokens))
        return tuple(option for option in options if self._regexes.nothing not in option)

    def _sequence(self, tokens: list[tuple[str, str]]) -> Sequence:
        symbols: list[Symbol] = []
        while tokens and tokens[-1][1] not in "|)":
            symbols.append(self._symbol(tokens))
        return tuple(s for s in symbols if s is not self._regexes.empty)

    def _symbol(self, tokens: list[tuple[str, str]]) -> Symbol:
        kind, text = tokens.pop()
        if kind == "sign" and text == "(":
            options = self._options(tokens)
            if not tokens or tokens.pop()[1] != ")":
                raise NotRead("a group is not closed")
            return self._counted(options, tokens)
        if kind in ("string", "regex"):
            symbol: Symbol = self._regex(kind, text)
        elif kind == "name":
            if text not in self._bodies:
                raise NotRead(text)
            symbol = self._terminal(text) if _is_terminal(text) else RuleRef(text)
        else:
            raise NotRead(text)
        if tokens and (tokens[-1][0] == "count" or tokens[-1][1] in "*+?"):
            return self._counted(((symbol,),), tokens)
        return symbol

    def _counted(self, options: tuple[Sequence, ...], tokens: list[tuple[str, str]]) -> Group:
        return Group(options, *(_counts(tokens) or (1, 1)))

    # -- terminals: expressions under | & ~

    def _terminal(self, name: str) -> Regex:
        found = self._terminals.get(name)
        if found is None:
            tokens = _tokens(self._bodies[name], self._regexes.pause)
            found = self._terminals[name] = self._union(tokens)
            if tokens:
                raise NotRead(self._bodies[name][:60])
        return found

    def _union(self, tokens: list[tuple[str, str]]) -> Regex:
        options = [self._intersection(tokens)]
        while tokens and tokens[-1][1] == "|":
            tokens.pop()
            options.append(self._intersection(tokens))
        return self._regexes.union(options)

    def _intersection(self, tokens: list[tuple[str, str]]) -> Regex:
        parts = [self._concatenation(tokens)]
        while tokens and tokens[-1][1] == "&":
            tokens.pop()
            parts.append(self._concatenation(tokens))
        return self._regexes.both(parts)

    def _concatenation(self, tokens: list[tuple[str, str]]) -> Regex:
        parts: list[Regex] = []
        while tokens and tokens[-1][1] not in "|&)":
            parts.append(self._factor(tokens))
        if not parts:
            raise NotRead("an empty part")
        return self._regexes.sequence(parts)

    def _factor(self, tokens: list[tuple[str, str]]) -> Regex:
        if tokens[-1][1] == "~":
            tokens.pop()
            return self._regexes.complement(self._factor(tokens))
        inner = self._item(tokens)
        counts = _counts(tokens)
        return inner if counts is None else self._regexes.repeat(inner, *counts)

    def _item(self, tokens: list[tuple[str, str]]) -> Regex:
        kind, text = tokens.pop()
        if text == "(":
            inner = self._union(tokens)
            if not tokens or tokens.pop()[1] != ")":
                raise NotRead("a group is not closed")
            return inner
        if kind in ("string", "regex"):
            return self._regex(kind, text)
        if text in self._bodies and text[0].isupper():
            return self._terminal(text)
        raise NotRead(text)

    def _regex(self, kind: str, text: str) -> Regex:
        try:
            if kind == "string":
                return self._regexes.text(json.loads(text).encode())
            return self._regexes.parse(text[1:-1].replace(r"\/", "/"))
        except (ValueError, UnicodeError) as error:
            raise NotRead(f"{text[:60]}: {error}") from None


def _counts(tokens: list[tuple[str, str]]) -> tuple[int, int | None] | None:
    """How often what stands before comes, where that is said."""
    counts = {"*": (0, None), "+": (1, None), "?": (0, 1)}
    if tokens and tokens[-1][0] == "sign" and tokens[-1][1] in counts:
        return counts[tokens.pop()[1]]
    if tokens and tokens[-1][0] == "count":
        least, comma, most = tokens.pop()[1][1:-1].partition(",")
        return int(least), (int(most) if most else None) if comma else int(least)
    return None


def _tokens(body: str, pause: Callable[[], None] | None) -> list[tuple[str, str]]:
    """(kind, text), the first one last."""
    found: list[tuple[str, str]] = []
    at = 0
    body = body.rstrip()
    while at < len(body):
        match = _TOKEN.match(body, at)
        if match is None:
            raise NotRead(body[at : at + 60])
        found.append((str(match.lastgroup), match[match.lastgroup or 0]))
        at = match.end()
        if pause is not None:
            pause()
    return found[::-1]
