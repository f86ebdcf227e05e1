"""Whatever the grammar writes for the format "regex" is one."""

from __future__ import annotations

import random
import re

import pytest
from llguidance import LLMatcher

from sglite.grammar.schema.emptiness import _tokenizer
from sglite.grammar.schema.formats import NARROWED_FORMATS
from sglite.grammar.schema.pattern_text import found_in
from sglite.grammar.schema.regex_format import regex_expression
from sglite.grammar.schema.strings import content

PIECES = [
    *"abz09 .|?*+()[]{}^$\\-,:=!<&~_/é", r"\d", "[a-z]", "[^a]", "(?:", "(?=", "(?!", "(?<=", "{2}", "{1,3}", "{3,1}",
    r"\x41", r"\u0041", "[A-Za-z0-9_]", r"\.", r"[\w.-]", "[z-a]", r"\b", r"\1", "(?P<n>", "(?i)", "{10,15}", "{15,10}",
    "[ -~]", r"\p{L}",
]  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_taken_is_a_regex(seed):
    rng, taken = random.Random(seed), 0
    for _ in range(400):
        text = "".join(rng.choice(PIECES) for _ in range(rng.randrange(1, 9)))
        if found_in(NARROWED_FORMATS["regex"], text):
            re.compile(text)
            taken += 1
    assert taken > 50


@pytest.mark.parametrize("seed", range(2))
def test_in_pieces_it_takes_the_same_texts(seed):
    rng, taken = random.Random(seed), 0
    matcher = LLMatcher(_tokenizer(), LLMatcher.grammar_from_lark(f"start: T\nT: {regex_expression()}\n"), log_level=0)
    for _ in range(300):
        text = "".join(rng.choice(PIECES) for _ in range(rng.randrange(1, 9)))
        spelled = list(content(text).encode())
        count = matcher.try_consume_tokens(spelled)
        takes = count == len(spelled) and matcher.is_accepting()
        matcher.rollback(count)
        assert takes == found_in(NARROWED_FORMATS["regex"], text), text
        taken += takes
    assert taken > 30
