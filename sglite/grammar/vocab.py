"""A model's vocabulary as the grammar engines see it: the bytes each token adds, and which tokens are never text."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from sglite.errors import InvalidRequest
from sglite.grammar import bitmask
from sglite.grammar.canonical import ForcedTexts
from sglite.grammar.matcher import Bitmask
from sglite.grammar.sole import SoleTokens
from sglite.text.types import TextTokenizer

INERT_IN_STRING, INERT_OUTSIDE = 1, 2
_WHOLE_KEY = rb'\s*"(?:[^"\\]|\\.)*"\s*(?:$|:)'
_NOT_PLAIN = bytes(range(0x20)) + b'"\\\x7f'  # what a JSON string escapes
_NOT_ASCII = bytes(range(0x80, 0x100))


class TokenSet:
    """A few tokens, ready to be looked for in rows of masks."""

    __slots__ = ("_bits", "_words")

    def __init__(self, mask: Bitmask) -> None:
        self._words = np.flatnonzero(mask)
        self._bits = mask[self._words]

    def __bool__(self) -> bool:
        return len(self._words) > 0

    def in_row(self, row: Bitmask) -> list[int]:
        """The tokens of the set that `row` allows."""
        hits = row[self._words] & self._bits
        if not hits.any():
            return []
        flags = np.unpackbits(hits.view(np.uint8), bitorder="little").reshape(len(hits), 32)
        word, bit = np.nonzero(flags)
        return (self._words[word] * 32 + bit).tolist()


@dataclass(frozen=True, eq=False)
class Vocab:
    """Immutable; the derived tables are made at first use and are safe to share between threads."""

    tokens: tuple[bytes, ...]  # by id; b"": no text (special, unused, padded tail). len: the model's vocab size
    names: tuple[bytes, ...]  # by id: a special token's spelling, e.g. b"<|im_end|>"; b"" for the others
    stop_ids: tuple[int, ...]  # legal only where a value is complete; at least one
    encode: Callable[[str], list[int]]  # canonical token ids of a text, no special token parsed or added

    def __post_init__(self) -> None:
        if not self.stop_ids:
            raise InvalidRequest("a constraint needs a model with at least one stop token id", param="stop_token_ids")
        bad = [i for i in self.stop_ids if not 0 <= i < len(self.tokens)]
        if bad:
            raise InvalidRequest(f"stop token ids {bad} are outside the vocabulary", param="stop_token_ids")

    @staticmethod
    def of(
        tokenizer: TextTokenizer, *, vocab_size: int | None = None, stop_token_ids: Sequence[int] | None = None
    ) -> Vocab:
        """`vocab_size`: the model's, with its padded tail (default: the tokenizer's)."""
        size = tokenizer.vocab_size if vocab_size is None else vocab_size
        known = min(size, tokenizer.vocab_size)
        stop_ids = tuple(dict.fromkeys(tokenizer.stop_token_ids if stop_token_ids is None else stop_token_ids))
        never_text = tokenizer.special_ids.union(stop_ids)
        tokens = [b"" if i in never_text else tokenizer.token_bytes(i) for i in range(known)]
        names = [b""] * size
        for i in never_text:
            if i < size:
                names[i] = tokenizer.decode([i], skip_special_tokens=False).encode()
        return Vocab(
            tokens=(*tokens, *([b""] * (size - known))),
            names=tuple(names),
            stop_ids=stop_ids,
            encode=lambda text: tokenizer.encode(text, add_special_tokens=False, parse_special=False),
        )

    @staticmethod
    def of_bytes() -> Vocab:
        """One token a byte, and one stop token: what a constraint accepts does not depend on the vocabulary."""
        return Vocab(
            tokens=(*(bytes([i]) for i in range(256)), b""),
            names=(*([b""] * 256), b"<|end|>"),
            stop_ids=(256,),
            encode=lambda text: list(text.encode()),
        )

    @cached_property
    def forced_texts(self) -> ForcedTexts:
        return ForcedTexts(self)

    @cached_property
    def sole_tokens(self) -> SoleTokens:
        return SoleTokens(self)

    def warm(self) -> None:
        """Make every table now (0.1 s for 49k tokens) and not within a request's first step."""
        _ = self.stop_mask, self.text_mask, self.plain_mask, self.openers_mask
        _ = self._sorted, self._by_bytes, self._byte_masks, self.longest, self.byte_ids
        _ = self.inertness, self.before_quotes, self.whole_keys, self.later_keys_outside, self.later_keys_in_string

    @property
    def size(self) -> int:
        return len(self.tokens)

    @cached_property
    def stop_mask(self) -> Bitmask:
        """int32[words] with the stop ids set; not to be written."""
        return bitmask.of(self.stop_ids, self.size)

    @cached_property
    def text_mask(self) -> Bitmask:
        """int32[words] with every token that is text set; not to be written."""
        return bitmask.of(np.flatnonzero(self._lengths), self.size)

    @cached_property
    def _lengths(self) -> np.ndarray:
        """int64[size]: bytes of each token."""
        return np.fromiter(map(len, self.tokens), np.int64, self.size)

    @cached_property
    def _flat(self) -> tuple[np.ndarray, np.ndarray]:
        """All tokens' bytes side by side  # uint8[n], and whose each is  # int32[n]."""
        data = np.frombuffer(b"".join(self.tokens), np.uint8)
        return data, np.repeat(np.arange(self.size, dtype=np.int32), self._lengths)

    @cached_property
    def _with_quote(self) -> list[int]:
        """The tokens that hold a quote, which are few."""
        return bitmask.ids(self.holding(b'"')).tolist()

    @cached_property
    def _sorted(self) -> tuple[list[bytes], np.ndarray]:
        """Text tokens in byte order, and their ids."""
        order = [i for i in sorted(range(self.size), key=self.tokens.__getitem__) if self.tokens[i]]
        return [self.tokens[i] for i in order], np.array(order, dtype=np.int64)

    @cached_property
    def _by_bytes(self) -> dict[bytes, tuple[int, ...]]:
        table: dict[bytes, tuple[int, ...]] = {}
        for token_id, text in enumerate(self.tokens):
            if text:
                table[text] = (*table.get(text, ()), token_id)
        return table

    def with_bytes(self, text: bytes) -> tuple[int, ...]:
        """The ids whose bytes are exactly `text`."""
        return self._by_bytes.get(text, ())

    def extending(self, prefix: bytes) -> np.ndarray:
        """int64[n]: ids of the tokens whose bytes start with `prefix` (equal ones included), in byte order."""
        texts, token_ids = self._sorted
        return token_ids[bisect_left(texts, prefix) : self._end_of(texts, prefix)]

    @cached_property
    def kept(self) -> dict[Any, Any]:
        """What others have worked out of these tokens and want to find again."""
        return {}

    @cached_property
    def longest(self) -> int:
        """Bytes of the longest token."""
        return int(self._lengths.max())

    def reaches_over(self, text: bytes) -> bool:
        """Whether some token starts with `text` and goes on."""
        texts, _ = self._sorted
        start = bisect_right(texts, text)
        return start < len(texts) and texts[start].startswith(text)

    def inside(self, text: bytes) -> list[int]:
        """Ids of the tokens whose bytes are a proper, non-empty prefix of `text`."""
        return [i for end in range(1, len(text)) for i in self.with_bytes(text[:end])]

    @cached_property
    def _byte_masks(self) -> dict[int, Bitmask]:
        """By byte, int32[words] with the tokens that hold it."""
        data, owner = self._flat
        flags = np.zeros((256, 32 * bitmask.words(self.size)), np.uint8)
        flags[data, owner] = 1
        rows = np.packbits(flags, axis=1, bitorder="little").view(np.int32)
        return {byte: rows[byte] for byte in np.unique(data).tolist()}

    def holding(self, some_of: bytes) -> Bitmask:
        """int32[words]: the tokens that hold at least one of the bytes; b"" means every text token."""
        if not some_of:
            return self.text_mask
        masks = [self._byte_masks[b] for b in set(some_of) if b in self._byte_masks]
        return np.bitwise_or.reduce(masks) if masks else bitmask.empty(self.size)

    @cached_property
    def byte_ids(self) -> np.ndarray:
        """int64[n]: the ids of the single-byte tokens, by byte."""
        return np.array([i for byte in range(256) for i in self.with_bytes(bytes([byte]))[:1]], dtype=np.int64)

    @cached_property
    def plain_mask(self) -> Bitmask:
        """int32[words]: tokens that are whole characters and stay within a JSON string."""
        plain = self.text_mask & ~self.holding(_NOT_PLAIN)
        broken = (i for i in bitmask.ids(plain & self.holding(_NOT_ASCII)).tolist() if not _decodes(self.tokens[i]))
        return plain & ~bitmask.of(broken, self.size)

    @cached_property
    def openers_mask(self) -> Bitmask:
        """int32[words]: tokens with two or more of the characters that begin an array or object."""
        data, owner = self._flat
        openers = np.bincount(owner[(data == ord("[")) | (data == ord("{"))], minlength=self.size)
        return bitmask.of(np.flatnonzero(openers > 1), self.size)

    @cached_property
    def inertness(self) -> bytes:
        """By id, INERT_IN_STRING: neither ends nor escapes anything within a JSON string. INERT_OUTSIDE: neither begins
        nor ends a string, array or object, or a part of one, where it begins outside of strings."""
        active = ~np.stack([self.holding(b'"\\'), self.holding(b'"[]{},')])
        in_string, outside = np.unpackbits(active.view(np.uint8), axis=1, bitorder="little")[:, : self.size]
        return (INERT_IN_STRING * in_string + INERT_OUTSIDE * outside).tobytes()

    @cached_property
    def before_quotes(self) -> frozenset[bytes]:
        """What stands before some quote of some token."""
        texts = (self.tokens[i] for i in self._with_quote)
        return frozenset(text[:i] for text in texts for i, byte in enumerate(text) if byte == 0x22)

    def _set_of(self, begin: re.Pattern[bytes]) -> TokenSet:
        return TokenSet(bitmask.of((i for i, text in enumerate(self.tokens) if text and begin.match(text)), self.size))

    def _keys(self, begin: re.Pattern[bytes]) -> TokenSet:
        """The same of a pattern that needs a quote."""
        return TokenSet(bitmask.of((i for i in self._with_quote if begin.match(self.tokens[i])), self.size))

    @cached_property
    def whole_keys(self) -> TokenSet:
        """Tokens that can hold a whole key where a key is due."""
        return self._keys(re.compile(rb"(?:|.*[{,])" + _WHOLE_KEY, re.DOTALL))

    @cached_property
    def later_keys_outside(self) -> TokenSet:
        """Tokens that can hold a whole key where none is due, outside of strings."""
        return self._keys(re.compile(rb".*[{,]" + _WHOLE_KEY, re.DOTALL))

    @cached_property
    def later_keys_in_string(self) -> TokenSet:
        """Tokens that can hold a whole key after the end of the string at hand."""
        return self._keys(re.compile(rb'.*"[^"]*[{,]' + _WHOLE_KEY, re.DOTALL))

    @cached_property
    def repeated_keys(self) -> TokenSet:
        """Tokens that can hold a key twice."""
        return self._set_of(re.compile(rb'.*"((?:[^"\\]|\\.)*)"\s*:.*"\1"', re.DOTALL))

    @cached_property
    def no_tokens(self) -> TokenSet:
        return TokenSet(bitmask.empty(self.size))

    @cached_property
    def closers_outside(self) -> TokenSet:
        """Tokens that can end a value where they begin outside of a string."""
        return self._set_of(re.compile(rb'.*(?:[,\]}]|".*")', re.DOTALL))

    @cached_property
    def closers_in_string(self) -> TokenSet:
        """Tokens that can end a string and more, where they begin within it."""
        return self._set_of(re.compile(rb'.*".*(?:[,\]}]|".*")', re.DOTALL))

    @cached_property
    def numeric_outside(self) -> TokenSet:
        """Tokens that can end a value or hold some of a number where they begin outside of a string."""
        return self._set_of(re.compile(rb'.*(?:[-+.0-9eE,\]}]|".*")', re.DOTALL))

    @cached_property
    def numeric_in_string(self) -> TokenSet:
        """Tokens that can end a string and more, or hold some of a number after it, where they begin within it."""
        return self._set_of(re.compile(rb'.*".*(?:[-0-9,\]}]|".*")', re.DOTALL))

    @cached_property
    def _first_byte(self) -> np.ndarray:
        """int16[size]: by id, -1 for what is no text."""
        return np.array([text[0] if text else -1 for text in self.tokens], dtype=np.int16)

    def first_bytes(self, row: Bitmask) -> list[bytes]:
        """The first bytes of the text tokens in the row."""
        found = np.unique(self._first_byte[bitmask.ids(row)])
        return [bytes((byte,)) for byte in found.tolist() if byte >= 0]

    def spell(self, text: bytes) -> list[int] | None:
        """Some tokens for the bytes, longest first; None where the vocabulary lacks one."""
        found: list[int] = []
        at = 0
        while at < len(text):
            for end in range(min(len(text), at + self.longest), at, -1):
                token_ids = self.with_bytes(text[at:end])
                if token_ids:
                    found.append(token_ids[0])
                    at = end
                    break
            else:
                return None
        return found

    def bytes_of(self, token_ids: Sequence[int]) -> bytes:
        return b"".join(self.tokens[i] for i in token_ids)

    @staticmethod
    def _end_of(texts: list[bytes], prefix: bytes) -> int:
        """The first index whose text is past everything that starts with `prefix`."""
        bumped = prefix.rstrip(b"\xff")
        if not bumped:
            return len(texts)
        return bisect_left(texts, bumped[:-1] + bytes([bumped[-1] + 1]))


def _decodes(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
