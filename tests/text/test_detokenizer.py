from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from sglite.text.detokenizer import Detokenizer
from sglite.text.tokenizer import Tokenizer
from tests.fakes.tokenizer import EOS, ByteTokenizer

BYTES = ByteTokenizer()


@given(ids=st.lists(st.integers(0, 258)))
def test_joined_pieces_equal_the_final_decode_for_any_tokens(ids: list[int]) -> None:
    stream = Detokenizer(BYTES)
    pieces = [stream.push([i]) for i in ids]
    assert "".join([*pieces, stream.flush()]) == BYTES.decode(ids)


@given(text=st.text(alphabet="aé你🙂👨‍👩‍👧 \n"))
def test_a_piece_never_holds_half_a_character(text: str) -> None:
    stream = Detokenizer(BYTES)
    given_out = ""
    for i in text.encode():
        given_out += stream.push([i])
        assert text.startswith(given_out)
    assert given_out == text
    assert stream.flush() == ""


def test_cjk_and_emoji_from_a_real_vocabulary_kind(byte_level_folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(byte_level_folder)
    text = "hello 北京🙂 w"
    ids = tokenizer.encode(text)
    stream = Detokenizer(tokenizer)
    pieces = [stream.push([i]) for i in ids]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == text


def test_an_unfinished_character_comes_out_at_the_end_only() -> None:
    stream = Detokenizer(BYTES)
    assert stream.push("é".encode()[:1]) == ""
    assert stream.pending == b"\xc3"
    assert stream.flush() == "\ufffd"


def test_special_tokens_are_text_only_on_request(byte_level_folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(byte_level_folder)
    ids = tokenizer.encode("hello<|im_end|>")
    assert Detokenizer(tokenizer).push(ids) == "hello"
    assert Detokenizer(tokenizer, skip_special_tokens=False).push(ids) == "hello<|im_end|>"
    assert Detokenizer(BYTES).push([104, EOS]) == "h"


def test_an_output_may_complete_a_character_of_the_prompt() -> None:
    data = "x🙂".encode()
    stream = Detokenizer(BYTES, context=list(data[:-2]))
    assert stream.push(data[-2:]) == "🙂"
    assert Detokenizer(BYTES, context=list(b"plain")).push(b"!") == "!"


def test_a_copy_goes_its_own_way() -> None:
    stream = Detokenizer(BYTES)
    stream.push("é".encode()[:1])
    twin = stream.copy()
    assert stream.push("é".encode()[1:]) == "é"
    assert twin.pending == b"\xc3"
