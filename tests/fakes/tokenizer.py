"""A tokenizer whose ids are bytes, for tests that need no model: 0..255 bytes, then bos, eos and eot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

BOS, EOS, EOT = 256, 257, 258


class ByteTokenizer:
    vocab_size = 259
    bos_token_id: int | None = BOS
    stop_token_ids: tuple[int, ...] = (EOS, EOT)
    special_ids = frozenset({BOS, EOS, EOT})
    adds_bos = False
    has_chat_template = True

    def encode(self, text: str, *, add_special_tokens: bool = False, parse_special: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(t for t in token_ids if t < 256).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_args: Any,
    ) -> str:
        text = "".join(f"<{m['role']}>{m['content']}</{m['role']}>\n" for m in messages)
        return text + ("<assistant>" if add_generation_prompt else "")
