"""Whether a terminal matches anything at all, asked of the engine's own regex machinery."""

from __future__ import annotations

from functools import lru_cache

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

_END = 256


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
