"""Forced text is counted by penalties like drawn text, whichever way it entered."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.matcher import choice
from tests.fakes.tiny_models import tiny_executor, tiny_reference
from tests.fakes.tokenizer import ByteTokenizer
from tests.runtime.harness import Harness

_ENDS = [a + b + c + d for a in "th" for b in "es" for c in "wn" for d in "do"]
WORDS = choice(*(f"the same words {end} and the same end" for end in _ENDS))
PENALTIES = (
    {"repetition_penalty": 1.7},
    {"presence_penalty": 1.5, "frequency_penalty": 0.9},
    {"frequency_penalty": 1.2, "temperature": 0.8, "seed": 3},
)


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
@pytest.mark.parametrize("fields", PENALTIES, ids=["repetition", "presence", "random"])
def test_the_text_is_the_same_with_and_without_jumping(tmp_path: Path, overlap: bool, fields: dict[str, float]) -> None:
    tiny_reference("llama").save_pretrained(tmp_path)
    harness = Harness(executor=tiny_executor(tmp_path, vocab_size=ByteTokenizer.vocab_size), overlap=overlap)
    for prompt in ("say", "say it", "thethe"):
        slow = harness.generate(prompt, grammar=WORDS, jump_forward=False, max_tokens=64, **fields)
        fast = harness.generate(prompt, grammar=WORDS, max_tokens=64, **fields)
        assert fast.token_ids == slow.token_ids
        assert fast.usage.forced_tokens > 20
