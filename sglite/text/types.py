"""What the rest of sglite asks of a tokenizer. Tests use a byte tokenizer that satisfies it too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class TextTokenizer(Protocol):
    vocab_size: int  # ids 0 .. vocab_size - 1 exist in the tokenizer (the model may have a padded tail beyond)
    bos_token_id: int | None
    stop_token_ids: tuple[int, ...]  # all ids that end a turn: tokenizer's eos and all of generation_config's
    special_ids: frozenset[int]  # never text
    adds_bos: bool  # encode(add_special_tokens=True) would prepend bos

    def encode(self, text: str, *, add_special_tokens: bool = False, parse_special: bool = True) -> list[int]:
        """Token ids of text. parse_special=False: text that spells a special token becomes plain characters."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Incomplete UTF-8 at the ends becomes U+FFFD."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that this token adds to the text; b"" for special tokens and unused ids."""
        ...

    # May also have `joined_bytes(token_ids: Sequence[int]) -> bytes`: those of all, in less time than one by one.

    @property
    def has_chat_template(self) -> bool: ...

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_args: Any,
    ) -> str:
        """The chat template's text, rendered in a sandbox with a time and size limit. Raises InvalidRequest."""
        ...
