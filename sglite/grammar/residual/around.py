"""JSON values within other text: where the next one begins.

markers   texts right before a value (a tag's beginning, a call's head); the text around never holds one otherwise
heads     patterns of all the text between the last value, or the start, and a value
answer    the text is a value from its first byte on, unless it begins with a tag
"""

from __future__ import annotations

import re

import msgspec

_LONGEST_HEAD = 512  # bytes of a text that a head may match
_SHORT_MARKER = 8  # bytes of one that a token may hold whole


class Around(msgspec.Struct, frozen=True, kw_only=True):
    """Each with the shape of the value behind it (an index into `ResidualRules.shapes`, or NOTHING)."""

    markers: tuple[tuple[bytes, int], ...] = ()
    heads: tuple[tuple[str, int], ...] = ()  # as Python has patterns, of UTF-8; they end in ':'
    answer: tuple[bytes, int] | None = None  # the tag


class ValueFinder:
    """`text` is all before `data`, which goes on from it; `begin`: where the text since the last value begins."""

    def __init__(self, around: Around) -> None:
        self._markers = around.markers
        self._heads = [(re.compile(pattern.encode()), shape) for pattern, shape in around.heads]
        self._answer = around.answer
        last_bytes = [marker[-1] for marker, _ in around.markers]
        self._last_bytes = frozenset([*last_bytes, 0x3A] if around.heads else last_bytes)
        self._longest = max((len(marker) for marker, _ in around.markers), default=0)

    def next_value(self, begin: int, text: bytes | bytearray, data: bytes, at: int) -> tuple[int, int] | None:
        """Where in `data`, from `at` on, a value may begin, and its shape; None: not within it. A place before `data`
        is negative: only now it shows that the text is a value from its start."""
        if self._answer is not None and begin == 0:
            tag, shape = self._answer
            start = bytes(text[: len(tag)]) + data[: max(0, len(tag) - len(text))]
            if start != tag:
                return None if len(start) < len(tag) and tag.startswith(start) else (-len(text), shape)
        for place in range(at, len(data)):
            if data[place] in self._last_bytes:
                shape = self._shape_behind(begin, text, data[: place + 1])
                if shape is not None:
                    return place + 1, shape
        return None

    def _shape_behind(self, begin: int, text: bytes | bytearray, data: bytes) -> int | None:
        if self._markers:
            tail = bytes(text[max(begin, len(text) - self._longest) :]) + data[max(0, begin - len(text)) :]
            for marker, shape in self._markers:
                if tail.endswith(marker):
                    return shape
        if self._heads and len(text) + len(data) - begin <= _LONGEST_HEAD:
            between = bytes(text[begin:]) + data[max(0, begin - len(text)) :]
            for pattern, shape in self._heads:
                if pattern.fullmatch(between):
                    return shape
        return None

    def is_near(self, begin: int, text: bytes | bytearray) -> bool:
        """Whether a single token can lead from here into a value and further."""
        if self._answer is not None and begin == 0 and len(text) < len(self._answer[0]):
            return True
        if self._heads and len(text) - begin <= _LONGEST_HEAD:
            return True
        tail = bytes(text[max(begin, len(text) - self._longest) :])
        return any(
            len(marker) <= _SHORT_MARKER or any(tail.endswith(marker[:size]) for size in range(len(marker) - 1, 0, -1))
            for marker, _ in self._markers
        )
