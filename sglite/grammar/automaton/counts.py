"""Counts that a token cannot tell apart.

    "[" item ("," item){63,} "]"       items of at least 60 bytes, tokens of at most 128

After 5 items or after 40, no token reaches the place where the array may end: it would hold 20 more items. So whatever
may come within one token is the same, and a mask made at one place is the other's. Such counts are replaced by one that
stands for them all: 0 below the least number, the least number between it and the most.
"""

from __future__ import annotations

from sglite.grammar.automaton.lark import Group, RuleRef, Rules, Sequence, Symbol
from sglite.grammar.automaton.regex import Regex


class Counts:
    """`reach`: bytes of the longest token."""

    def __init__(self, rules: Rules, reach: int) -> None:
        self._rules = rules
        self._reach = reach
        self._of_rule: dict[str, int] = {}
        self._of_regex: dict[Regex, int] = {}
        self._near: dict[Group, int] = {}

    def usual(self, body: Group, count: int) -> int:
        """The count that stands for this one."""
        near = self._near.get(body)
        if near is None:
            least = min((self._of_sequence(option) for option in body.options), default=0)
            # those that a token can begin, with the one that it begins in
            near = self._near[body] = self._reach // least + 2 if least else self._reach + 2
        if count + near < body.least:
            return 0
        if count >= body.least and body.most is not None and count + near < body.most:
            return body.least
        return count

    def _of_sequence(self, symbols: Sequence) -> int:
        return sum(self._of_symbol(symbol) for symbol in symbols)

    def _of_symbol(self, symbol: Symbol) -> int:
        """No text of it has fewer bytes."""
        if isinstance(symbol, Regex):
            return least_bytes(symbol, self._of_regex)
        if isinstance(symbol, Group):
            return symbol.least * min((self._of_sequence(option) for option in symbol.options), default=0)
        assert isinstance(symbol, RuleRef)
        found = self._of_rule.get(symbol.name)
        if found is None:
            self._of_rule[symbol.name] = 0  # within itself: no text has fewer
            options = self._rules[symbol.name]
            found = self._of_rule[symbol.name] = min((self._of_sequence(option) for option in options), default=0)
        return found


def least_bytes(regex: Regex, known: dict[Regex, int]) -> int:
    """No text of the expression has fewer bytes. `known` is added to."""
    found = known.get(regex)
    if found is None:
        parts = regex.parts
        match regex.kind:
            case "set":
                found = 1
            case "cat":
                found = 0
                at = regex
                while at.kind == "cat":  # sequences lean to the right
                    found += least_bytes(at.parts[0], known)
                    at = at.parts[1]
                found += least_bytes(at, known)
            case "or":
                found = min(least_bytes(part, known) for part in parts)
            case "and":
                found = max(least_bytes(part, known) for part in parts)
            case "repeat":
                found = parts[1] * least_bytes(parts[0], known)
            case _:
                found = 0
        known[regex] = found
    return found
