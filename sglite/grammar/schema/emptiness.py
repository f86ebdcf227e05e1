"""Whether a terminal matches anything at all, or only a few texts, asked of the engine's own regex machinery."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

_END = 256
_MAX_BYTES = 256  # of a text that is written out


class _Bytes:
    """The smallest tokenizer: 256 bytes and an end."""

    eos_token_id = _END
    bos_token_id = None
    tokens = [bytes([i]) for i in range(256)] + [b"<end>"]
    special_token_ids = [_END]

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@lru_cache(maxsize=1)
def _tokenizer() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Bytes()))


@lru_cache(maxsize=1024)
def has_no_match(expression: str) -> bool:
    matcher = LLMatcher(_tokenizer(), LLMatcher.grammar_from_lark(f"start: T\nT: {expression}\n"), log_level=0)
    if matcher.is_error():
        return False
    mask = matcher.compute_bitmask()
    return not any(mask) and not matcher.is_accepting()


@lru_cache(maxsize=256)
def some_texts(expression: str, most: int) -> tuple[bytes, ...] | None:
    """Texts that the terminal matches: all of them, or `most` + 1 where there are more. None where the search takes
    too long."""
    matcher = LLMatcher(_tokenizer(), LLMatcher.grammar_from_lark(f"start: T\nT: {expression}\n"), log_level=0)
    found: list[bytes] = []
    text = bytearray()
    ways = [_next_bytes(matcher, found, text)]
    for _ in range(_MAX_BYTES * (most + 1)):
        if not ways or len(found) > most:
            return tuple(found[: most + 1])
        byte = next(ways[-1], None)
        if byte is None:
            ways.pop()
            if ways:
                matcher.rollback(1)
                text.pop()
        elif matcher.try_consume_tokens([byte]) == 1:
            text.append(byte)
            ways.append(_next_bytes(matcher, found, text))
        if len(ways) > _MAX_BYTES:
            return None
    return None


def _next_bytes(matcher: LLMatcher, found: list[bytes], text: bytearray) -> Iterator[int]:
    """The bytes that may follow the text, which is noted where it may end."""
    if matcher.is_accepting():
        found.append(bytes(text))
    if matcher.is_stopped():
        return iter(())
    mask = matcher.compute_bitmask()
    return iter([byte for byte in range(_END) if mask[byte >> 3] >> (byte & 7) & 1])
