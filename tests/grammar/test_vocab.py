from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sglite.grammar import bitmask
from sglite.grammar.vocab import INERT_IN_STRING, INERT_OUTSIDE, Vocab

BYTES = st.sampled_from(list(b'\x00\x01\x1f a"\\[]{},\x7f\x80\xc3\xa9\xff'))
TOKENS = st.lists(st.lists(BYTES, max_size=4).map(bytes), min_size=1, max_size=70)


def vocab(tokens: list[bytes]) -> Vocab:
    return Vocab(tokens=tuple(tokens), names=(b"",) * len(tokens), stop_ids=(0,), encode=lambda text: [])


def is_utf8(text: bytes) -> bool:
    return text.decode(errors="replace").encode() == text


@given(TOKENS)
def test_the_tables_say_what_each_token_says(tokens: list[bytes]) -> None:
    table = vocab(tokens)
    for byte in range(256):
        held = [i for i, text in enumerate(tokens) if byte in text]
        assert bitmask.ids(table.holding(bytes([byte]))).tolist() == held
    plain = [i for i, t in enumerate(tokens) if t and is_utf8(t) and not any(b < 32 or b in b'"\\\x7f' for b in t)]
    assert bitmask.ids(table.plain_mask).tolist() == plain
    for text, inert in zip(tokens, table.inertness, strict=True):
        assert bool(inert & INERT_IN_STRING) == (not any(byte in b'"\\' for byte in text))
        assert bool(inert & INERT_OUTSIDE) == (not any(byte in b'"[]{},' for byte in text))


@given(TOKENS, st.lists(BYTES, max_size=2).map(bytes))
def test_tokens_are_found_by_what_they_begin_with_in_byte_order(tokens: list[bytes], prefix: bytes) -> None:
    found = vocab(tokens).extending(prefix)
    assert found.dtype == np.int64
    wanted = sorted((text, i) for i, text in enumerate(tokens) if text and text.startswith(prefix))
    assert found.tolist() == [i for _, i in wanted]
