"""Forced text that the grammar's own ends make certain, though the vocabulary alone does not.

Where bytes are forced, llguidance leaves out the tokens at their end that some token could join with what follows:
in `":"` before one of the values DE and FR, where the vocabulary has `"D`, the text could go on as `":` and `"D`. No
tokenizer does that if it splits the text and whatever may follow into `":"` and the rest. Then that token is as certain
as the others, and the mask allows it alone:

    forced bytes    " : "          legal: `"`, `":`, `":"`; none reaches beyond the forced bytes
    what follows          D or F   encode(`":"D`) and encode(`":"F`) begin with `":"`: that is the one
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from sglite.grammar import bitmask
from sglite.grammar.matcher import Bitmask

if TYPE_CHECKING:
    from sglite.grammar.vocab import Vocab

_MEMO_SIZE = 4096
_NO_BYTE = 256
_MOST_LEGAL = 32  # tokens where one is to be certain: beginnings of a short text


class Native(Protocol):
    """What is asked of llguidance's matcher."""

    def try_consume_tokens(self, tokens: list[int], /) -> int: ...

    def rollback(self, num_tokens: int, /) -> bool: ...


class SoleTokens:
    """Which token is certain at places of forced text where none was told to be. Thread-safe."""

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self._split = lru_cache(_MEMO_SIZE)(self._split_before)

    def find(self, native: Native, text: bytes, legal: Bitmask, fill: Callable[[Bitmask], None]) -> int | None:
        """`text`: the bytes that are forced. `legal`: the mask here  # int32[words]. `fill(row)` writes the mask of
        wherever `native` stands. It stays where it is."""
        tokens = self._vocab.tokens
        if len(text) >= self._vocab.longest:  # further than a token reaches, alike places may differ
            return None
        ids = _few_ids(legal)
        if not ids or not all(tokens[i] and text.startswith(tokens[i]) for i in ids):
            return None
        if len(ids) == 1:
            return ids[0]
        split = self._split(text, b"")
        if not split or split[0] not in ids:
            return None
        taken = native.try_consume_tokens(list(split))
        row = bitmask.empty(self._vocab.size)
        if taken == len(split):
            fill(row)
        if taken:
            native.rollback(taken)
        if taken < len(split):
            return None
        following = np.unique(self._first_bytes[bitmask.ids(row)])  # in the order of the bytes
        return split[0] if self._split(text, bytes(following[following < _NO_BYTE].tolist())) else None

    @cached_property
    def _first_bytes(self) -> NDArray[np.uint16]:
        """Of each token; a mask may allow all of them."""
        return np.array([token[0] if token else _NO_BYTE for token in self._vocab.tokens], np.uint16)

    def _split_before(self, text: bytes, following: bytes) -> tuple[int, ...]:
        """How the text is split, alone and before each of these bytes; empty: not always the same, or not told."""
        try:
            split = self._vocab.encode(text.decode())
            if self._vocab.bytes_of(split) != text:
                return ()
            for byte in following:
                if self._vocab.encode((text + bytes((byte,))).decode())[: len(split)] != split:
                    return ()
        except UnicodeDecodeError:
            return ()
        return tuple(split)


def _few_ids(row: Bitmask) -> list[int]:
    """The ids that are set; empty where they are many."""
    places = np.flatnonzero(row)
    if len(places) > _MOST_LEGAL:
        return []
    words = row.view(np.uint32)[places].tolist()
    ids = [32 * place + bit for place, word in zip(places.tolist(), words, strict=True) for bit in _bits(word)]
    return ids if len(ids) <= _MOST_LEGAL else []


def _bits(word: int) -> list[int]:
    return [bit for bit in range(32) if word >> bit & 1]
