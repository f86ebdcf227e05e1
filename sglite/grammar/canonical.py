"""Which tokens of a forced text are certain, whatever follows it, and however it is walked."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglite.grammar.vocab import Vocab

_MEMO_SIZE = 4096  # forced texts remembered
_MOST_SPLITS = 65_536


class ForcedTexts:
    """Where splitting a text at once and splitting what is left at each token are the same. Remembers; thread-safe."""

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self._length = lru_cache(_MEMO_SIZE)(self._agreed_length)

    def agreed(self, text: bytes, token_ids: Sequence[int]) -> list[int]:
        """The leading ones of `token_ids`, the canonical tokens at the start of `text`, that a walk gives too."""
        return list(token_ids[: self._length(text, tuple(token_ids))])

    def _agreed_length(self, text: bytes, token_ids: tuple[int, ...]) -> int:
        offset = 0
        for i, token_id in enumerate(token_ids):
            rest = text[offset:].decode(errors="replace")
            if self._vocab.encode(rest)[: len(token_ids) - i] != list(token_ids[i:]):
                return i
            offset += len(self._vocab.tokens[token_id])
        return len(token_ids)


class ForcedSplits:
    """How a forced text splits into tokens behind its left neighbour, as llguidance looks at it. Remembers."""

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self._known: dict[tuple[bytes, int], tuple[int | str, ...]] = {}
        self._alone: dict[bytes, tuple[int, ...]] = {}  # without a neighbour

    def split(self, text: bytes, last_token: int) -> tuple[int | str, ...]:
        """Equal where the split behind the neighbour is; -1: there is none. Where the text is not looked into, the
        neighbour itself tells."""
        key = text, last_token
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _MOST_SPLITS:
                self._known.clear()
                self._alone.clear()
            found = self._known[key] = self._split(text, last_token)
        return found

    def _split(self, text: bytes, last_token: int) -> tuple[int | str, ...]:
        neighbour = self._vocab.tokens[last_token] if last_token >= 0 else b""
        try:
            alone, behind = text.decode(), (neighbour + text).decode()
        except UnicodeDecodeError:
            return ("behind", last_token)
        if not text or (last_token >= 0 and not neighbour):
            return ("behind", last_token)
        token_ids = self._vocab.encode(behind)
        if neighbour and token_ids[:1] == [last_token]:
            return tuple(token_ids[1:])
        if not neighbour:
            return tuple(token_ids)
        found = self._alone.get(text)
        if found is None:
            found = self._alone[text] = tuple(self._vocab.encode(alone))
        return found


def certain_tokens(text: str, vocab: Vocab) -> list[int]:
    """The leading tokens of `text` in canonical tokenisation that no continuation can change.

        text   |--- certain ---|- may merge -|
                               p = first position from which the rest is the beginning of some longer token

    A continuation can only change the split where a token would reach over the end of `text`; such a token
    begins at or after p, and the token that holds p, with all after it, is left out.
    """
    data = text.encode()
    token_ids = vocab.encode(text)
    if vocab.bytes_of(token_ids) != data:
        return []  # a tokenizer that rewrites text (adds a blank, normalises) has no certain tokens here
    candidates = range(max(0, len(data) - vocab.longest), len(data))
    boundary = next((p for p in candidates if vocab.reaches_over(data[p:])), len(data))
    certain: list[int] = []
    end = 0
    for token_id in token_ids:
        end += len(vocab.tokens[token_id])
        if end > boundary:
            break
        certain.append(token_id)
    return certain
