"""The real tokenizer of SmolLM2 gives what transformers gives."""

from __future__ import annotations

import random
from typing import Any

import pytest

from sglite.runtime.models.sources import resolve_model
from sglite.text.detokenizer import Detokenizer
from sglite.text.tokenizer import Tokenizer

pytestmark = pytest.mark.model

TEXTS = [
    "",
    " ",
    "Hello, world! It's 12345.67 and  two  spaces\n\n\tand a tab",
    "naïve café 日本語 한국어 عربى हिन्दी ไทย 🙂 👨‍👩‍👧‍👦 🏳️‍🌈 e\u0301 \u200b \ufeff \x00\x7f",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><|im_start|>",
    "def f(x):\n    return x**2  # 3.14\n" * 3,
    '{"name": "Ada", "tags": ["a", "b"], "n": -1.5e10}',
    "ﬁ ① ½ ™ Å ǅ",
]


@pytest.fixture(scope="module")
def folder() -> str:
    return str(resolve_model("smollm2").tokenizer_folder)


@pytest.fixture(scope="module")
def ours(folder: str) -> Tokenizer:
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def theirs(folder: str) -> Any:
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)


def random_texts(count: int) -> list[str]:
    rng = random.Random(0)
    ranges = [(32, 127), (160, 0x250), (0x4E00, 0x4F00), (0x1F600, 0x1F64F), (0x600, 0x660), (9, 14)]
    texts = []
    for _ in range(count):
        length = rng.randrange(40)
        texts.append("".join(chr(rng.randrange(*rng.choice(ranges))) for _ in range(length)))
    return texts


def test_ids_and_texts_are_equal(ours: Tokenizer, theirs: Any) -> None:
    for text in TEXTS + random_texts(300):
        ids = ours.encode(text, add_special_tokens=True)
        assert ids == theirs(text)["input_ids"]
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_any_ids_decode_alike_whole_and_in_pieces(ours: Tokenizer, theirs: Any) -> None:
    rng = random.Random(1)
    for _ in range(200):
        ids = [rng.randrange(ours.vocab_size) for _ in range(rng.randrange(30))]
        text = theirs.decode(ids, skip_special_tokens=True)
        stream = Detokenizer(ours)
        assert ours.decode(ids) == text
        assert "".join([*(stream.push([i]) for i in ids), stream.flush()]) == text


def test_chats_render_alike(ours: Tokenizer, theirs: Any) -> None:
    chats = [
        [{"role": "user", "content": "hi"}],
        [{"role": "system", "content": "be brief"}, {"role": "user", "content": " <b>é</b> "}],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}],
    ]
    for chat in chats:
        for prompt in (True, False):
            expected = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt)
            assert ours.render_chat(chat, add_generation_prompt=prompt) == expected


def test_special_ids_are_those_of_transformers(ours: Tokenizer, theirs: Any) -> None:
    assert set(theirs.all_special_ids) <= ours.special_ids
    assert ours.vocab_size == len(theirs)
    assert ours.stop_token_ids[0] == theirs.eos_token_id
