"""Stop texts and stop regexes over a growing text, whatever the borders of its tokens.

The rule is that of a text which grows by one character at a time: the output stops with the first character after which
some stop is there, and of those that end with it the one that begins first counts. So `END\\d+` stops after the first
digit, and `$` and `\\b` hold where the text ends so far.

Text that may be the beginning of a stop is held back until it is certain; what was given out is never part of one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import regex

from sglite.errors import InvalidRequest

_MAX_REGEX_LENGTH = 512
_MAX_REGEX_DEPTH = 50  # the compiler recurses
_MAX_REGEX_REPEATS = 5000  # the compiler writes a repeated group out: all such counts multiplied
_GROUP_REPEAT = regex.compile(r"\)\s*\{\s*(\d*)\s*(?:,\s*(\d*))?\s*\}")
_EMPTY_S = 0.05  # seconds, for matching nothing
_CONTEXT = 256  # characters of given-out text that a look-behind may still see


class StopRegexTimeout(Exception):
    """The stop regexes of one completion used up their time."""


@dataclass(frozen=True, slots=True)
class StopMatch:
    text: str  # the stop text as it stands in the output
    spec: str  # what was asked for: the stop text, or the regex


def compile_stop_regex(pattern: str) -> regex.Pattern[str]:
    """Raises InvalidRequest."""
    if len(pattern) > _MAX_REGEX_LENGTH:
        raise InvalidRequest(f"a stop_regex may have {_MAX_REGEX_LENGTH} characters at most", param="stop_regex")
    if _depth(pattern) > _MAX_REGEX_DEPTH:
        raise InvalidRequest(f"groups of a stop_regex may be {_MAX_REGEX_DEPTH} deep at most", param="stop_regex")
    counts = (max(int(n or 1), int(m or 1), 1) for n, m in _GROUP_REPEAT.findall(pattern))
    if math.prod(counts) > _MAX_REGEX_REPEATS:
        raise InvalidRequest(
            f"a stop_regex may repeat its groups {_MAX_REGEX_REPEATS} times at most, all counts multiplied",
            param="stop_regex",
        )
    if _SEARCH_START.search(pattern):
        raise InvalidRequest("a stop_regex cannot use \\G: a search begins anywhere", param="stop_regex")
    try:
        compiled = regex.compile(pattern)
        empty = compiled.fullmatch("", timeout=_EMPTY_S) is not None
    except (regex.error, RecursionError, OverflowError, MemoryError, ValueError, TimeoutError) as error:
        raise InvalidRequest(
            f"stop_regex {pattern!r} is not a regular expression: {error}", param="stop_regex"
        ) from None
    if empty:
        raise InvalidRequest(f"stop_regex {pattern!r} matches the empty text", param="stop_regex")
    if compiled.flags & regex.REVERSE:
        raise InvalidRequest("a stop_regex cannot search backwards: drop (?r)", param="stop_regex")
    return compiled


def _depth(pattern: str) -> int:
    """At least as deep as the pattern's groups are: brackets in character sets count too."""
    depth = deepest = 0
    escaped = False
    for char in pattern:
        if not escaped:
            depth += (char == "(") - (char == ")" and depth > 0)
            deepest = max(deepest, depth)
        escaped = char == "\\" and not escaped
    return deepest


# What can match at the end of a text and not within a longer one: anchors, borders of words, look-ahead, and what takes
# all it can and gives none back. A match of any other pattern stays a match as the text grows.
_SEES_THE_END = regex.compile(r"\$|\\[bBZzmMX]|\(\?[=!>(]|[*+?}]\+|\(\*")
_SEARCH_START = regex.compile(r"(?<!\\)(?:\\\\)*\\G")


class _Found(NamedTuple):
    """Ordered: what is complete first, then what begins first. Characters of the held text."""

    complete: int  # after so many characters the stop is there
    start: int
    end: int
    spec: str


class StopChecker:
    """One per completion. `budget_s`: seconds that its regexes may take in all."""

    def __init__(
        self, texts: Sequence[str], patterns: Sequence[regex.Pattern[str]], *, include_stop: bool, budget_s: float
    ) -> None:
        self._texts = tuple(texts)
        self._longest = max(map(len, texts), default=0)
        self._patterns = tuple((pattern, _SEES_THE_END.search(pattern.pattern) is not None) for pattern in patterns)
        self._include = include_stop
        self._left_s = budget_s
        self._context = ""  # given out
        self._held = ""  # not yet
        self._tested = 0  # characters of the held text within which there is no stop

    def push(self, text: str, *, armed: bool) -> tuple[str, StopMatch | None]:
        """Text that is certain now, and the stop that was found (the rest is dropped then).

        `armed` False (before min_tokens): everything is given out and nothing stops.
        Raises StopRegexTimeout.
        """
        self._held += text
        if not armed:
            self._tested = 0
            return self._give_out(len(self._held)), None
        found = self._first_match()
        if found is not None:
            match = StopMatch(self._held[found.start : found.end], found.spec)
            return self._give_out(found.end if self._include else found.start), match
        given = self._give_out(self._certain())
        self._tested = len(self._held)
        return given, None

    def flush(self) -> str:
        """The output is over without a stop: what was held back."""
        return self._give_out(len(self._held))

    def _first_match(self) -> _Found | None:
        """The stop that is complete first; of several that are complete with the same character, the one that begins
        first."""
        found: list[_Found] = []
        for text in self._texts:
            at = self._held.find(text)
            if at >= 0:
                found.append(_Found(at + len(text), at, at + len(text), text))
        for pattern, sees_end in self._patterns:
            limit = min((stop.complete for stop in found), default=len(self._held))
            hit = self._first_end(pattern, limit) if sees_end else self._bisected_end(pattern, limit)
            if hit is not None:
                found.append(hit)
        return min(found, default=None)

    def _first_end(self, pattern: regex.Pattern[str], limit: int) -> _Found | None:
        """The match that is there first as the held text grows to `limit` characters."""
        for size in range(self._tested + 1, limit + 1):
            hit = self._search(pattern, size)
            if hit is not None:
                return _Found(size, *hit, pattern.pattern)
        return None

    def _bisected_end(self, pattern: regex.Pattern[str], limit: int) -> _Found | None:
        """The same for a pattern whose matches stay as the text grows."""
        low, high = self._tested, limit  # there is none within `low` characters
        hit = self._search(pattern, high)
        if hit is None:
            return None
        while high - low > 1:
            middle = (low + high) // 2
            found = self._search(pattern, middle)
            if found is None:
                low = middle
            else:
                hit, high = found, middle
        return _Found(high, *hit, pattern.pattern)

    def _certain(self) -> int:
        """Characters of the held text that no stop can begin in."""
        certain = len(self._held)
        for text in self._texts:
            for start in range(max(0, len(self._held) - len(text) + 1), certain):
                if text.startswith(self._held[start:]):
                    certain = start
                    break
        for pattern, _ in self._patterns:
            hit = self._search(pattern, len(self._held), partial=True)
            if hit is not None:
                certain = min(certain, hit[0])
        return certain

    def _search(self, pattern: regex.Pattern[str], size: int, *, partial: bool = False) -> tuple[int, int] | None:
        """The first match that takes a character at least, as if the held text ended after `size` characters; with
        `partial` also one that more text could complete."""
        if self._left_s <= 0:
            raise StopRegexTimeout(pattern.pattern)
        began = time.perf_counter()
        offset = len(self._context)
        text = self._context + self._held[:size]
        try:
            for hit in pattern.finditer(text, offset, partial=partial, timeout=self._left_s):
                if hit.start() < len(text) and (hit.partial or hit.end() > hit.start()):
                    return hit.start() - offset, hit.end() - offset
        except TimeoutError:
            raise StopRegexTimeout(pattern.pattern) from None
        finally:
            self._left_s -= time.perf_counter() - began
        return None

    def _give_out(self, n: int) -> str:
        out, self._held = self._held[:n], self._held[n:]
        if self._patterns:
            self._context = (self._context + out)[-_CONTEXT:]
        return out
