"""Token ids to text, piece by piece, without ever cutting a character."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

from sglite.text.types import TextTokenizer

_MAX_PENDING = 3  # bytes of a UTF-8 character that can be waiting for its last one


class Detokenizer:
    """The incremental twin of `decode`: the pieces of `push` and `flush`, joined, are the text of all the ids.

    A piece holds whole characters only; at most three bytes wait inside. What was given out is never taken back.
    `context`: the prompt's ids (its last few are enough), for an output that completes a character begun there.
    One object per completion; `copy` for a completion that branches.
    """

    __slots__ = ("_joined_bytes", "_pending", "_skip_special", "_special", "_token_bytes", "_tokenizer")

    def __init__(
        self, tokenizer: TextTokenizer, *, skip_special_tokens: bool = True, context: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._token_bytes = tokenizer.token_bytes
        self._joined_bytes: Callable[[Sequence[int]], bytes] | None = getattr(tokenizer, "joined_bytes", None)
        self._special = tokenizer.special_ids if not skip_special_tokens else frozenset[int]()
        self._pending = self._begun_in(context)

    def _begun_in(self, context: Sequence[int]) -> bytes:
        """The character that these ids begin and do not complete."""
        if not context:
            return b""
        last = self._bytes_of(context[-1])
        if last and last[-1] < 0x80:  # as nearly always
            return b""
        return _incomplete_end(b"".join(map(self._bytes_of, context[-_MAX_PENDING - 1 :])))

    def push(self, token_ids: Sequence[int]) -> str:
        """The characters that these ids complete; may be empty."""
        if self._special:
            data = b"".join([self._pending, *map(self._bytes_of, token_ids)])
        elif self._joined_bytes is not None and len(token_ids) > 1:
            data = self._pending + self._joined_bytes(token_ids)
        else:
            data = b"".join([self._pending, *map(self._token_bytes, token_ids)])
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    def flush(self) -> str:
        """What still waits, as U+FFFD: call once at the end."""
        text = self._pending.decode("utf-8", "replace")
        self._pending = b""
        return text

    @property
    def pending(self) -> bytes:
        """Bytes of a character that is not complete yet."""
        return self._pending

    def copy(self) -> Detokenizer:
        """An independent detokenizer at the same position."""
        twin = Detokenizer(self._tokenizer, skip_special_tokens=self._skip_special)
        twin._pending = self._pending
        return twin

    def _bytes_of(self, token_id: int) -> bytes:
        if token_id in self._special:
            return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()
        return self._token_bytes(token_id)


def _incomplete_end(data: bytes) -> bytes:
    """The bytes at the end that begin a UTF-8 character and do not complete it."""
    for back in range(1, min(_MAX_PENDING, len(data)) + 1):
        lead = data[-back]
        if lead & 0b1100_0000 == 0b1000_0000:  # a continuation byte: its lead is further left
            continue
        needs = 4 if lead >= 0xF0 else 3 if lead >= 0xE0 else 2 if lead >= 0xC0 else 1
        return data[-back:] if needs > back else b""
    return b""
