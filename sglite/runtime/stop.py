"""Stop texts and stop regexes over a growing text; stop texts whatever the borders of its tokens.

Text that may be the beginning of a stop text is held back until it is certain; what was given out is never part of one.
A regex stops at the first match that the text so far has: where more text would have made that match longer (`END\\d+`
after "END4"), how much of it was seen depends on where the tokens end.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import regex

from sglite.errors import InvalidRequest

_MAX_REGEX_LENGTH = 512
_MAX_REGEX_DEPTH = 50  # the compiler recurses
_MAX_REGEX_REPEATS = 5000  # the compiler writes a repeated group out: all such counts multiplied
_GROUP_REPEAT = regex.compile(r"\)\s*\{\s*(\d*)\s*(?:,\s*(\d*))?\s*\}")
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
    try:
        return regex.compile(pattern)
    except (regex.error, RecursionError, OverflowError, MemoryError, ValueError) as error:
        raise InvalidRequest(
            f"stop_regex {pattern!r} is not a regular expression: {error}", param="stop_regex"
        ) from None


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


class StopChecker:
    """One per completion. `budget_s`: seconds that its regexes may take in all."""

    def __init__(
        self, texts: Sequence[str], patterns: Sequence[regex.Pattern[str]], *, include_stop: bool, budget_s: float
    ) -> None:
        self._texts = tuple(texts)
        self._longest = max(map(len, texts), default=0)
        self._patterns = tuple(patterns)
        self._include = include_stop
        self._left_s = budget_s
        self._context = ""  # given out
        self._held = ""  # not yet

    def push(self, text: str, *, armed: bool) -> tuple[str, StopMatch | None]:
        """Text that is certain now, and the stop that was found (the rest is dropped then).

        `armed` False (before min_tokens): everything is given out and nothing stops.
        Raises StopRegexTimeout.
        """
        self._held += text
        if not armed:
            return self._give_out(len(self._held)), None
        found = self._first_match()
        if found is not None:
            start, end, spec = found
            match = StopMatch(self._held[start:end], spec)
            return self._give_out(end if self._include else start), match
        return self._give_out(self._certain()), None

    def flush(self) -> str:
        """The output is over without a stop: what was held back."""
        return self._give_out(len(self._held))

    def _first_match(self) -> tuple[int, int, str] | None:
        """(start, end, spec) within the held text of the stop that begins first."""
        best: tuple[int, int, str] | None = None
        for text in self._texts:
            at = self._held.find(text)
            if at >= 0 and (best is None or at < best[0]):
                best = (at, at + len(text), text)
        for pattern in self._patterns:
            hit = self._search(pattern, partial=False)
            if hit is not None and hit[1] > hit[0] and (best is None or hit[0] < best[0]):
                best = (*hit, pattern.pattern)
        return best

    def _certain(self) -> int:
        """Characters of the held text that no stop can begin in."""
        certain = len(self._held)
        for text in self._texts:
            for start in range(max(0, len(self._held) - len(text) + 1), certain):
                if text.startswith(self._held[start:]):
                    certain = start
                    break
        for pattern in self._patterns:
            hit = self._search(pattern, partial=True)
            if hit is not None:
                certain = min(certain, hit[0])
        return certain

    def _search(self, pattern: regex.Pattern[str], *, partial: bool) -> tuple[int, int] | None:
        if self._left_s <= 0:
            raise StopRegexTimeout(pattern.pattern)
        began = time.perf_counter()
        offset = len(self._context)
        try:
            hit = pattern.search(self._context + self._held, offset, partial=partial, timeout=self._left_s)
        except TimeoutError:
            raise StopRegexTimeout(pattern.pattern) from None
        finally:
            self._left_s -= time.perf_counter() - began
        if hit is None or hit.start() >= offset + len(self._held):
            return None
        return hit.start() - offset, hit.end() - offset

    def _give_out(self, n: int) -> str:
        out, self._held = self._held[:n], self._held[n:]
        if self._patterns:
            self._context = (self._context + out)[-_CONTEXT:]
        return out
