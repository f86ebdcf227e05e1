from __future__ import annotations

import random

import llguidance
import pytest

from sglite.grammar.engines.fuse import fuse_delimiters
from sglite.grammar.engines.llguidance import LLGuidanceEngine
from sglite.grammar.vocab import Vocab
from sglite.protocol import GrammarSpec

STRING = r'(?:[^"\\\x00-\x1f]|\\["\\bfnrt]|\\u00(?:0[0-7bef]|1[0-9a-f]))*'
OPEN_KEY = "\n".join(
    [
        "start: T0 T1*",
        f'T0: /"/ (/{STRING}/ & ~/(?:id|name)/) /":/',
        f'T1: /,"/ (/{STRING}/ & ~/(?:id|name)/ & ~/x.*/) /": ?/',
        "",
    ]
)
PLAIN = 'start: T0 "a"\nT0: /"[a-z]*"/\nT1: /[0-9]/ (/a*/ & ~/aa/) /b/\n'


def test_delimiters_move_into_each_operand():
    fused = fuse_delimiters(OPEN_KEY)
    assert f'T0: /"(?:{STRING})":/ & ~/"(?:(?:id|name))":/' in fused
    assert f'T1: /,"(?:{STRING})": ?/ & ~/,"(?:(?:id|name))": ?/ & ~/,"(?:x.*)": ?/' in fused


def test_other_terminals_stay_as_they_are():
    assert fuse_delimiters(PLAIN) == PLAIN


@pytest.mark.parametrize("seed", range(3))
def test_the_language_is_the_same(seed):
    engine = LLGuidanceEngine(Vocab.of_bytes())
    spec = GrammarSpec(kind="json_schema", source="{}")
    before, after = (
        engine.compile(spec, llguidance.LLMatcher.grammar_from_lark(text))
        for text in (OPEN_KEY, fuse_delimiters(OPEN_KEY))
    )
    rng = random.Random(seed)
    pieces = ['"', '"id"', '"name"', ":", ",", " ", "i", "d", "x", "name", '\\"', "\\", "é", '":', ',"', "nam", "\n"]
    for _ in range(400):
        text = "".join(rng.choice(pieces) for _ in range(rng.randint(1, 9)))
        tokens = list(text.encode())
        first, second = before.matcher(), after.matcher()
        assert first.accept(tokens) == second.accept(tokens), text
        assert first.can_stop == second.can_stop, text
