"""How large a regex is, from its text alone: no automaton is built.

Reads Rust's syntax loosely: what it misreads is misjudged in size, never in meaning; only limits hang on it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_LIMIT = 1 << 40  # numbers beyond it are all the same

_COUNT = re.compile(r"\{(\d*)(,?)(\d*)\}")
_GROUP_HEAD = re.compile(r"\?(?:P?<[^>]*>|[a-zA-Z-]*:|[a-zA-Z-]*(?=\)))")
_ESCAPE = re.compile(r"\\(?:[pPxuU]\{[^}]*\}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[pP].|.)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class RegexSize:
    shortest: int  # bytes of the shortest text that matches
    reach: int  # the most that may be missing to the nearest match, whatever has been matched so far
    expanded: int  # characters and classes, with counted repeats written out


def regex_size(pattern: str) -> RegexSize:
    """Raises RecursionError for nesting that no engine takes."""
    return _Reader(pattern).alternatives()


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def alternatives(self) -> RegexSize:
        branches = [self.sequence()]
        while self.text[self.at : self.at + 1] == "|":
            self.at += 1
            branches.append(self.sequence())
        return RegexSize(
            shortest=min(b.shortest for b in branches),
            reach=max(b.reach for b in branches),
            expanded=_capped(sum(b.expanded for b in branches)),
        )

    def sequence(self) -> RegexSize:
        parts: list[RegexSize] = []
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            parts.append(self.repeated(self.atom()))
        shortest = reach = expanded = 0
        for part in reversed(parts):
            reach = max(reach, part.reach + shortest)
            shortest = _capped(shortest + part.shortest)
            expanded = _capped(expanded + part.expanded)
        return RegexSize(shortest, _capped(reach), expanded)

    def atom(self) -> RegexSize:
        char = self.text[self.at]
        if char == "(":
            return self.group()
        if char == "[":
            self.skip_class()
            return RegexSize(1, 1, 1)
        if char == "\\":
            escape = _ESCAPE.match(self.text, self.at)
            self.at = len(self.text) if escape is None else escape.end()
            zero_width = escape is not None and escape[0][1] in "AzZbB"
            return RegexSize(0, 0, 0) if zero_width else RegexSize(1, 1, 1)
        self.at += 1
        size = 0 if char in "^$" else len(char.encode())
        return RegexSize(size, size, size)

    def group(self) -> RegexSize:
        self.at += 1
        head = _GROUP_HEAD.match(self.text, self.at)
        if head is not None:
            self.at = head.end()
        inner = self.alternatives()
        self.at += 1  # the closing parenthesis
        return inner

    def skip_class(self) -> None:
        """Over `[...]`, nested classes too; `]` right at the start is a member."""
        depth = 0
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == "\\":
                self.at += 1
            elif char == "[":
                depth += 1
                rest = self.text[self.at + 1 : self.at + 3]
                self.at += 2 if rest[:2] == "^]" else 1 if rest[:1] == "]" else 0
            elif char == "]":
                depth -= 1
            self.at += 1
            if depth == 0:
                return

    def repeated(self, size: RegexSize) -> RegexSize:
        """`size` under the quantifiers that follow."""
        while self.at < len(self.text):
            char = self.text[self.at]
            count = _COUNT.match(self.text, self.at) if char == "{" else None
            if char in "*?":
                size = RegexSize(0, size.reach, size.expanded)
            elif count is not None:
                least = int(count[1] or 0)
                most = int(count[3] or least) if count[2] else least
                size = RegexSize(
                    _capped(size.shortest * least),
                    _capped(size.reach + size.shortest * max(least - 1, 0)),
                    _capped(size.expanded * max(least, most, 1)),
                )
            elif char != "+":
                return size
            self.at += 1 if count is None else len(count[0])
        return size


def _capped(number: int) -> int:
    return min(number, _LIMIT)
