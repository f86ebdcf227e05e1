"""What each token of a vocabulary does inside a JSON string, for every place within a character it may start at.

A place within a string is the number of characters that may still come (`room`) and where within a character the text
stands (`part`: 0 between two characters, else within an escape or within the UTF-8 of one). From there a token stays
inside, or closes the string and goes on behind it, or cannot come. It begins so many characters:

    adds    "ab" 2    "a\\" 2 (one is left open)    'a","b' 1 (those behind the quote do not count)

So the tokens that fit a bound are those with adds <= room, whatever the grammar is.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from sglite.grammar.automaton.regex import Regex, Regexes
from sglite.grammar.matcher import Bitmask
from sglite.grammar.spelling import UNIT

NO_BOUND = 1 << 40  # the room of a string without a maxLength
_MOST_ADDS = 255  # as many characters and more are one


class StringTables:
    """Made once per vocabulary (0.15 s for 152k tokens)."""

    def __init__(self, tokens: tuple[bytes, ...]) -> None:
        self._tokens = tokens
        self.prefixes, self._moves = _character_states()
        self.closed, self.dead = len(self.prefixes), len(self.prefixes) + 1
        self._lengths = np.array([len(token) for token in tokens], np.int64)
        self._starts = np.cumsum(self._lengths) - self._lengths
        self._data = np.frombuffer(b"".join(tokens), np.uint8)
        self.parts = [self._make(part) for part in range(len(self.prefixes))]

    def behind_quote(self, part: int, token_id: int) -> bytes:
        """What a token that closes the string, begun at `part`, has behind the quote."""
        token = self._tokens[token_id]
        at = 0
        while part != self.closed:
            part = int(self._moves[part, token[at]])
            at += 1
        return token[at:]

    def parts_of(self, regexes: Regexes) -> tuple[Regex, dict[Regex, int]]:
        """(the expression of one character, part by what is left of a character)."""
        unit = regexes.parse(UNIT)
        return unit, {regexes.follow(unit, prefix): part for part, prefix in enumerate(self.prefixes) if part}

    def _make(self, part: int) -> PartTable:
        """All tokens at once, byte after byte."""
        size = len(self._tokens)
        ends = np.full(size, part, np.uint8)
        ends[self._lengths == 0] = self.dead
        adds = np.zeros(size, np.int64)
        inside = np.flatnonzero(self._lengths)  # tokens that are inside so far and have more bytes
        at = 0
        while len(inside):
            before = ends[inside]
            after = self._moves[before, self._data[self._starts[inside] + at]]
            adds[inside] += (before == 0) & (after < self.closed)
            ends[inside] = after
            at += 1
            inside = inside[(after < self.closed) & (self._lengths[inside] > at)]
        return PartTable(ends, adds, closed=self.closed)


class PartTable:
    """For one part: by token, where it ends and what it adds; and sets of tokens as masks."""

    def __init__(self, ends: NDArray[np.uint8], adds: NDArray[np.int64], *, closed: int) -> None:
        self.ends = ends.tobytes()  # the part it ends at, or `closed`, or `dead`
        self._adds = np.minimum(adds, _MOST_ADDS).astype(np.uint8)
        self.adds = self._adds.tobytes()
        self.stays = _mask(ends < closed)
        self.closes = _mask(ends == closed)
        live = ends <= closed
        self.most = int(adds[live].max()) if live.any() else 0  # with so much room, bound and no bound are the same
        self.within = lru_cache(512)(self._within)

    @property
    def counts_all(self) -> bool:
        """No token adds more than can be told apart."""
        return self.most < _MOST_ADDS

    def _within(self, room: int) -> Bitmask:
        """The tokens that add at most `room`  # int32[words], not to be written"""
        return _mask(self._adds <= room)


def _mask(flags: NDArray[np.bool_]) -> Bitmask:
    padded = np.zeros(-(-len(flags) // 32) * 32, np.bool_)
    padded[: len(flags)] = flags
    return np.packbits(padded, bitorder="little").view(np.int32)


def _character_states() -> tuple[list[bytes], NDArray[np.uint8]]:
    """(bytes that lead to each part, moves  # uint8[parts + 2, 256]): `closed` takes all that follows."""
    regexes = Regexes(10_000)
    unit = regexes.parse(UNIT)
    numbers: dict[Regex, int] = {regexes.empty: 0}
    prefixes = [b""]
    moves: list[list[Regex]] = []
    states = [regexes.empty]
    while len(moves) < len(states):
        here = states[len(moves)]
        prefix = prefixes[len(moves)]
        row = [regexes.rest(unit if here is regexes.empty else here, byte) for byte in range(256)]
        for byte, rest in enumerate(row):
            if rest is not regexes.nothing and rest not in numbers:
                numbers[rest] = len(states)
                states.append(rest)
                prefixes.append(prefix + bytes([byte]))
        moves.append(row)
    closed, dead = len(states), len(states) + 1
    table = np.full((len(states) + 2, 256), dead, np.uint8)
    for number, row in enumerate(moves):
        table[number] = [numbers.get(rest, dead) for rest in row]
    table[0, ord('"')] = closed
    table[closed] = closed
    return prefixes, table
