"""llguidance over single bytes: whether a prepared schema's grammar accepts a whole text."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from sglite.grammar.schema import PreparedSchema
from sglite.grammar.schema.values import string_text

END = 256


class _Bytes:
    eos_token_id = END
    bos_token_id = None
    tokens = [bytes([i]) for i in range(256)] + [b"<end>"]
    special_token_ids = [END]

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


# 1,000 optional keys are 3,000 items of a row.
_LIMITS = LLParserLimits(max_items_in_row=50_000, verbose_errors=False)
_TOKENIZER = LLTokenizer(TokenizerWrapper(_Bytes()))


class ByteEngine:
    """Raises ValueError where llguidance refuses the grammar."""

    def __init__(self, prepared: PreparedSchema) -> None:
        self.prepared = prepared
        self._start = LLMatcher(_TOKENIZER, LLMatcher.grammar_from_lark(prepared.lark), log_level=0, limits=_LIMITS)
        if self._start.is_error():
            raise ValueError(self._start.get_error())

    def accepts_text(self, text: str) -> bool:
        matcher = self._start.deep_copy()
        for byte in text.encode():
            if matcher.validate_tokens([byte]) != 1:
                assert not matcher.is_error(), matcher.get_error()
                return False
            matcher.consume_token(byte)
            matcher.compute_bitmask()  # what refills llguidance's fuel, as in decoding
        return matcher.is_accepting()

    def accepts(self, value: Any) -> bool:
        """The value in compact spelling, its keys put into schema order."""
        return self.accepts_text(compact(self.prepared.reorder(value)))


def compact(value: Any) -> str:
    """JSON without blanks; a Decimal keeps its own text."""
    if isinstance(value, Decimal):
        return str(value).replace("E", "e")
    if isinstance(value, dict):
        return "{" + ",".join(f"{string_text(k)}:{compact(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(compact(item) for item in value) + "]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return string_text(value) if isinstance(value, str) else str(value)
