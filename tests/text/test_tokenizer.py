from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglite.errors import InvalidRequest, ModelNotFound, UnsupportedModel
from sglite.text.tokenizer import Tokenizer

TEXTS = ["", "hello world", "héllo — 你好 🙂\n\t", "<|im_start|>user\nhi<|im_end|>", "<think>x"]


@pytest.fixture(scope="module")
def byte_level(byte_level_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(byte_level_folder)


@pytest.fixture(scope="module")
def sentencepiece(sentencepiece_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(sentencepiece_folder)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("parse_special", [True, False])
def test_decode_gives_back_what_was_encoded(byte_level: Tokenizer, text: str, parse_special: bool) -> None:
    ids = byte_level.encode(text, parse_special=parse_special)
    assert byte_level.decode(ids, skip_special_tokens=False) == text
    if not parse_special:
        assert not byte_level.special_ids.intersection(ids)
        assert byte_level.decode(ids) == text


@given(text=st.text())
def test_token_bytes_joined_are_the_text(byte_level: Tokenizer, text: str) -> None:
    ids = byte_level.encode(text, parse_special=False)
    assert b"".join(map(byte_level.token_bytes, ids)) == text.encode("utf-8", "surrogatepass")


def test_special_tokens_have_no_bytes_and_other_added_tokens_have(byte_level: Tokenizer) -> None:
    think, end = byte_level.token_id("<think>"), byte_level.token_id("<|im_end|>")
    assert think is not None
    assert end is not None
    assert byte_level.token_bytes(think) == b"<think>"
    assert byte_level.token_bytes(end) == b""
    assert byte_level.token_bytes(byte_level.vocab_size + 5) == b""  # a model's padded tail


def test_stop_ids_are_eos_and_all_of_generation_config(byte_level: Tokenizer) -> None:
    assert byte_level.stop_token_ids == (byte_level.token_id("<|im_end|>"), byte_level.token_id("<|end|>"))
    assert set(byte_level.stop_token_ids) <= byte_level.special_ids


def test_bos_is_known_and_added_where_the_file_says_so(byte_level: Tokenizer, sentencepiece: Tokenizer) -> None:
    assert not byte_level.adds_bos
    assert byte_level.bos_token_id is None
    assert sentencepiece.adds_bos
    assert sentencepiece.encode("ab", add_special_tokens=True)[0] == sentencepiece.bos_token_id == 1
    assert sentencepiece.encode("<s>", add_special_tokens=True, parse_special=False).count(1) == 1


def test_byte_fallback_tokens_are_single_bytes(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("ab 你")
    assert [sentencepiece.token_bytes(i) for i in ids] == [b" ab", b" ", b"\xe4", b"\xbd", b"\xa0"]
    assert sentencepiece.decode(ids) == " ab 你"


def test_negative_ids_are_an_error(byte_level: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="negative"):
        byte_level.decode([-1])


def test_a_folder_without_tokenizer_json_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(UnsupportedModel, match="save_pretrained"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UnsupportedModel, match="cannot be read"):
        Tokenizer.from_folder(tmp_path)


def test_the_template_file_wins_over_the_configured_one(byte_level_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(byte_level_folder, folder)
    messages = [{"role": "user", "content": "hi"}]
    expected = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert Tokenizer.from_folder(folder).render_chat(messages) == expected
    (folder / "chat_template.jinja").write_text("file {{ eos_token }}")
    assert Tokenizer.from_folder(folder).render_chat(messages) == "file <|im_end|>"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    (folder / "chat_template.jinja").unlink()
    config = {**json.loads((folder / "tokenizer_config.json").read_text()), "chat_template": named}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer.from_folder(folder).render_chat(messages) == "plain"
    assert Tokenizer.from_folder(folder).render_chat(messages, tools=[{"type": "function"}]) == "tools"


def test_without_a_template_chat_is_refused(sentencepiece: Tokenizer) -> None:
    assert not sentencepiece.has_chat_template
    with pytest.raises(InvalidRequest, match="no chat template"):
        sentencepiece.render_chat([])


def test_half_a_character_is_refused(byte_level: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="lone surrogate at character 1") as caught:
        byte_level.encode("a\ud800b")
    assert caught.value.param == "prompt"


def test_bytes_of_many_are_those_of_each(byte_level: Tokenizer) -> None:
    tokenizer = byte_level
    ids = [*tokenizer.encode("many of them, 你好"), tokenizer.vocab_size + 3, tokenizer.stop_token_ids[0]]
    for part in (ids, ids[:-2], ids[:1], []):
        for _ in range(2):  # before and after each is known
            assert tokenizer.joined_bytes(part) == b"".join(map(tokenizer.token_bytes, part))
    with pytest.raises(InvalidRequest):
        tokenizer.joined_bytes([ids[0], -1])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", "[" * 50_000),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", '{"chat_template": ["x"]}'),
        ("tokenizer_config.json", '{"chat_template": [{"name": "default"}]}'),
        ("chat_template.json", '"x"'),
        ("chat_template.json", '{"chat_template": 5}'),
        ("generation_config.json", "[" * 50_000),
        ("generation_config.json", '{"eos_token_id": [1, [2]]}'),
        ("generation_config.json", '{"eos_token_id": "<eos>"}'),
        ("generation_config.json", '{"eos_token_id": -1}'),
    ],
)
def test_damaged_files_are_told_by_their_folder(
    byte_level_folder: Path, tmp_path: Path, name: str, content: str
) -> None:
    folder = shutil.copytree(byte_level_folder, tmp_path / "damaged")
    (folder / name).write_text(content)
    with pytest.raises(UnsupportedModel, match="damaged"):
        Tokenizer.from_folder(folder)


def test_a_panic_of_the_library_is_a_damaged_file(byte_level_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(byte_level_folder, tmp_path / "panics")
    values = json.loads((folder / "tokenizer.json").read_text())
    values["model"]["continuing_subword_prefix"] = "longer than a piece"
    (folder / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(UnsupportedModel, match=r"panics.tokenizer\.json cannot be read"):
        Tokenizer.from_folder(folder)
