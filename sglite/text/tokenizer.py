"""A Hugging Face tokenizer folder as a `TextTokenizer`, over `tokenizers` alone: importing transformers takes seconds.

Steps: read the small JSON files (which ids are special, which end a turn), load tokenizer.json, and learn from its
decoder how a token's spelling becomes bytes. Text is always the tokens' bytes put together and decoded once, so that a
stream of pieces and the whole agree; unlike transformers, a sentencepiece decoder's "strip the first space" is not
applied.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from sglite.errors import InvalidRequest, ModelNotFound, UnsupportedModel
from sglite.text.chat import ChatTemplate
from sglite.text.json_file import read_object

_LONG_TEXT = 2_000  # characters from which the call that frees the interpreter lock (and has no offsets) is quicker
_SPACE = "\u2581"  # sentencepiece writes a blank as this
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """Satisfies `sglite.text.types.TextTokenizer`. Immutable after construction and safe to share between threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        stop_token_ids: Sequence[int] = (),
        bos_token: str | None = None,
        named_specials: Mapping[str, Any] | None = None,
        chat_template: ChatTemplate | None = None,
    ) -> None:
        """`named_specials`: what the chat template may refer to (bos_token, eos_token, ...)."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._added: dict[int, str] = {i: str(t.content) for i, t in added.items()}
        self.stop_token_ids: tuple[int, ...] = tuple(stop_token_ids)
        self.bos_token_id: int | None = None if bos_token is None else backend.token_to_id(bos_token)
        marks = {i for i in (*self.stop_token_ids, self.bos_token_id) if i is not None and i in added}
        self.special_ids: frozenset[int] = frozenset(i for i, t in added.items() if t.special) | marks
        # The base vocabulary is dense in every real tokenizer, but added ids may lie beyond holes.
        self.vocab_size: int = max(backend.get_vocab_size(with_added_tokens=False), max(added, default=-1) + 1)
        begin = backend.encode("", add_special_tokens=True).ids
        self.adds_bos: bool = self.bos_token_id is not None and begin[:1] == [self.bos_token_id]
        self._prefix: list[int] = begin[:1] if self.adds_bos else []
        self._named_specials = dict(named_specials or {})
        self._chat_template = chat_template
        self._to_bytes = _spelling_to_bytes(backend)
        self._bytes: list[bytes | None] = [None] * self.vocab_size
        spelled = sorted((re.escape(text) for text in self._added.values() if text), key=len, reverse=True)
        self._spells_added = re.compile("|".join(spelled)) if spelled else None

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """Load `path`/tokenizer.json and the files beside it.

        Raises ModelNotFound without a tokenizer, UnsupportedModel for a format that is not tokenizer.json.
        """
        folder = Path(path)
        file = folder / "tokenizer.json"
        if not file.is_file():
            if any((folder / name).is_file() for name in ("tokenizer.model", "vocab.json", "qwen.tiktoken")):
                raise UnsupportedModel(
                    f"{folder} holds a tokenizer in another format than tokenizer.json; convert it once with "
                    "transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
                )
            raise ModelNotFound(f"{file} does not exist; a model folder needs its tokenizer.json")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of the library, which damaged files cause, is no Exception
            raise UnsupportedModel(f"{file} cannot be read as a tokenizer: {error}") from error
        config = {**_read_json(folder / "special_tokens_map.json"), **_read_json(folder / "tokenizer_config.json")}
        specials = _named_specials(config)
        return cls(
            backend,
            stop_token_ids=_stop_ids(folder, backend, specials.get("eos_token")),
            bos_token=specials.get("bos_token"),
            named_specials=specials,
            chat_template=ChatTemplate.from_folder(folder, config.get("chat_template")),
        )

    def encode(self, text: str, *, add_special_tokens: bool = False, parse_special: bool = True) -> list[int]:
        """Token ids of text. parse_special=False: text that spells an added token becomes plain characters.

        Raises InvalidRequest for half a character (a lone surrogate).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"the text has a lone surrogate at character {error.start}, which no encoding holds", param="prompt"
            ) from None
        if parse_special or self._spells_added is None or self._spells_added.search(text) is None:
            if len(text) < _LONG_TEXT:
                return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
            return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return (self._prefix if add_special_tokens else []) + self._encode_plain(text)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The tokens' bytes as text; incomplete UTF-8 becomes U+FFFD.

        Raises InvalidRequest for a negative id; ids past the vocabulary (a model's padded tail) add nothing.
        """
        if skip_special_tokens:
            data = self.joined_bytes(token_ids)
        else:
            special = self.special_ids
            data = b"".join(self._added[i].encode() if i in special else self.token_bytes(i) for i in token_ids)
        return data.decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that this token adds to the text; b"" for special tokens and unused ids."""
        if not 0 <= token_id < self.vocab_size:
            if token_id < 0:
                raise InvalidRequest(f"token id {token_id} is negative")
            return b""
        known = self._bytes[token_id]
        if known is None:
            known = self._bytes[token_id] = self._make_bytes(token_id)
        return known

    def joined_bytes(self, token_ids: Sequence[int]) -> bytes:
        """token_bytes of all of them. 256 rows that end in one step would wait for as many calls each."""
        known = self._bytes
        if len(token_ids) and min(token_ids) >= 0 and max(token_ids) < self.vocab_size:
            parts = [known[i] for i in token_ids]
            if None not in parts:
                return b"".join(parts)  # type: ignore[arg-type]
        return b"".join(map(self.token_bytes, token_ids))

    def token_id(self, token: str) -> int | None:
        """The id of a token by its exact spelling (`"<think>"`, `"<|im_end|>"`), or None."""
        return self._backend.token_to_id(token)

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_args: Any,
    ) -> str:
        """The chat template's text, rendered in a sandbox with a time and size limit. Raises InvalidRequest."""
        if self._chat_template is None:
            raise InvalidRequest("this model has no chat template; send a plain prompt instead", param="messages")
        variables = {**self._named_specials, **template_args}
        return self._chat_template.render(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, variables=variables
        )

    def _make_bytes(self, token_id: int) -> bytes:
        if token_id in self.special_ids:
            return b""
        if token_id in self._added:
            return self._added[token_id].encode()
        spelling = self._backend.id_to_token(token_id)
        return b"" if spelling is None else self._to_bytes(spelling)

    def _encode_plain(self, text: str) -> list[int]:
        """The pipeline without its first stage, which cuts added tokens out of the text."""
        normalizer, pre_tokenizer, model = self._backend.normalizer, self._backend.pre_tokenizer, self._backend.model
        if normalizer is not None:
            text = normalizer.normalize_str(text)
        pieces = [text] if pre_tokenizer is None else [piece for piece, _ in pre_tokenizer.pre_tokenize_str(text)]
        ids: list[int] = []
        for piece in pieces:
            found = [token.id for token in model.tokenize(piece)]
            if not self._added.keys().isdisjoint(found):
                # The model itself knows the spelling as one piece: take it apart.
                found = [token.id for char in piece for token in model.tokenize(char)]
            ids += found
        return ids


def _read_json(file: Path) -> dict[str, Any]:
    """Empty where there is no such file. Raises UnsupportedModel for one that holds no JSON object."""
    return read_object(file) if file.is_file() else {}


def _named_specials(config: Mapping[str, Any]) -> dict[str, Any]:
    """`{"bos_token": "<s>", ...}`; older files write {"content": "<s>"} for "<s>"."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        if name.endswith("_token"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found[name] = text
    return found


def _stop_ids(folder: Path, backend: tokenizers.Tokenizer, eos_token: str | None) -> tuple[int, ...]:
    """The tokenizer's eos, then all of generation_config's (config.json's where that names none), none twice."""
    ids: list[int | None] = [backend.token_to_id(eos_token)] if eos_token else []
    for name in ("generation_config.json", "config.json"):
        configured = _read_json(folder / name).get("eos_token_id")
        if configured is not None:
            found = configured if isinstance(configured, list) else [configured]
            if not all(type(i) is int and 0 <= i < 2**31 for i in found):
                raise UnsupportedModel(f"{folder / name}: 'eos_token_id' must be token ids, not {configured!r}")
            ids += found
            break
    return tuple(dict.fromkeys(i for i in ids if i is not None))


def _spelling_to_bytes(backend: tokenizers.Tokenizer) -> Callable[[str], bytes]:
    """How this tokenizer's spelling of a token becomes bytes, from its decoder's description."""
    state = "" if backend.decoder is None else backend.decoder.__getstate__().decode()
    pre = "" if backend.pre_tokenizer is None else backend.pre_tokenizer.__getstate__().decode()
    if '"ByteLevel"' in state or (not state and '"ByteLevel"' in pre):
        table = _byte_level_table()

        def byte_level(spelling: str) -> bytes:
            try:
                return bytes([table[char] for char in spelling])
            except KeyError:  # not written in the byte alphabet: the characters themselves, as the library does
                return spelling.encode()

        return byte_level
    if '"ByteFallback"' in state or '"Metaspace"' in state or _SPACE in state or "\\u2581" in state:
        fallback = '"ByteFallback"' in state

        def sentencepiece(spelling: str) -> bytes:
            match = _BYTE_TOKEN.fullmatch(spelling) if fallback else None
            return bytes([int(match[1], 16)]) if match else spelling.replace(_SPACE, " ").encode()

        return sentencepiece
    raise UnsupportedModel(
        f"tokenizer decoder {state[:200] or 'none'} is not supported; byte-level BPE and sentencepiece tokenizers are"
    )


def _byte_level_table() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 bytes stand for themselves, the others for U+0100 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + n): byte for n, byte in enumerate(b for b in range(256) if b not in set(printable))})
    return table
