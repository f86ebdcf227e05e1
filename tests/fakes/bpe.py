"""A real byte-pair tokenizer of some hundred tokens, trained in milliseconds, for tests that need merges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

_CORPUS = [
    '{"name": "John Smith", "age": 42, "email": "john@example.com", "tags": ["red", "green", "blue"]}',
    '{"name":"Ann","firstName":"Ann","lastName":"Lee","orderId":17,"orderName":"x","active":true,"ok":false}',
    '[{"kind":"alpha","score":1.5},{"kind":"beta","score":-2.25e10},{"kind":"gamma","score":null}]',
    "The quick brown fox jumps over the lazy dog, and the answer is yes or no; ünïcödé 北京 and 😀 too.",
    'say \\"hello\\" and \\n new line \\u00e9 "," ": " "}, {" [[1,2],[3,4]] aaaa aaaaaaaa 000 111 2024-01-31',
] * 4


class BpeTokenizer:
    """Byte-level, 600 tokens at most; the last three ids are bos, eos and eot."""

    bos_token_id: int | None
    adds_bos = False
    has_chat_template = False

    def __init__(self) -> None:
        self._backend = Tokenizer(models.BPE())
        self._backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=597, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        )
        self._backend.train_from_iterator(_CORPUS, trainer)
        size = self._backend.get_vocab_size()
        self._plain = Tokenizer.from_str(self._backend.to_str())
        self._backend.add_special_tokens(["<|bos|>", "<|eos|>", "<|eot|>"])
        self.vocab_size = size + 3
        self.bos_token_id = size
        self.stop_token_ids: tuple[int, ...] = (size + 1, size + 2)
        self.special_ids = frozenset(range(size, size + 3))
        self._bytes_of_char = {char: byte for byte, char in enumerate(_byte_chars())}

    def encode(self, text: str, *, add_special_tokens: bool = False, parse_special: bool = True) -> list[int]:
        return (self._backend if parse_special else self._plain).encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        data = b"".join(self.token_bytes(i) for i in token_ids)
        return data.decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        if token_id in self.special_ids:
            return b""
        spelling = self._backend.id_to_token(token_id)
        return b"" if spelling is None else bytes(self._bytes_of_char[c] for c in spelling)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_args: Any,
    ) -> str:
        return "".join(m["content"] for m in messages)


@cache
def bpe_tokenizer() -> BpeTokenizer:
    return BpeTokenizer()


def _byte_chars() -> list[str]:
    """The printable character that byte-level BPE writes for each byte (GPT-2's table)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
