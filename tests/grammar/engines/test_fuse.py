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
NAMED_KEYS = "\n".join(
    [
        "start: T0 T1* T2?",
        f'T0: /"/ (/{STRING}/ & ~("id"|"a|b"|"|"|"")) /":/',
        f'T1: /,"/ (/{STRING}/ & ~("id"|"a|b"|"|"|"")) /":/',
        f'T2: /,"/ (/{STRING}/ & ~"x") /":/',
        "",
    ]
)
_WORD = "/[a-z]{1,3}[0-9]{1,3}[x-z]/"
GROUPS = f'start: T0\nT0: /"/ ((({_WORD}|"(")*) & ~("x)"|{_WORD})) /"/\n'
PLAIN = 'start: T0 "a"\nT0: /"[a-z]*"/\nT1: /[0-9]/ (/a*/ & ~/aa/) /b/\nT2: /"/ (~/aa/) /"/\n'


def test_the_delimiter_behind_moves_into_each_operand():
    fused = fuse_delimiters(OPEN_KEY)
    assert f'T0: "\\"" (/(?:{STRING})":/ & ~/(?:(?:id|name))":/)' in fused
    assert f'T1: ",\\"" (/(?:{STRING})": ?/ & ~/(?:(?:id|name))": ?/ & ~/(?:x.*)": ?/)' in fused


def test_contents_behind_two_beginnings_and_regexes_that_come_again_are_written_once():
    fused = fuse_delimiters(NAMED_KEYS)
    assert fused.count(STRING) == 1
    assert 'T0: "\\"" S1\nT1: ",\\"" S1\nT2: ",\\"" (S0 & ~("x\\":"))' in fused
    assert '\nS1: S0 & ~("id\\":"|"a|b\\":"|"|\\":"|"\\":")\n' in fused


def test_other_terminals_stay_as_they_are():
    assert fuse_delimiters(PLAIN) == PLAIN


def test_a_group_takes_the_delimiter_behind_it_as_a_whole():
    fused = fuse_delimiters(GROUPS)
    assert "S0: /[a-z]{1,3}[0-9]{1,3}[x-z]/" in fused
    assert 'T0: "\\"" ((((S0|"(")*) /"/) & ~(("x)"|S0) /"/))' in fused


def test_regexes_that_come_again_in_a_long_terminal_are_written_once():
    atom = f"/[{'a-z' * 1000}]/"
    fused = fuse_delimiters(f"start: T7\nT7: ({atom}|{atom} {atom}?)*\n")
    assert fused == f"start: T7\nT7: (T7S0|T7S0 T7S0?)*\nT7S0: {atom}\n"


@pytest.mark.parametrize(
    ("lark", "seed"), [(OPEN_KEY, 0), (OPEN_KEY, 1), (NAMED_KEYS, 2), (NAMED_KEYS, 3), (GROUPS, 4), (GROUPS, 5)]
)
def test_the_language_is_the_same(lark, seed):
    engine = LLGuidanceEngine(Vocab.of_bytes())
    spec = GrammarSpec(kind="json_schema", source="{}")
    before, after = (
        engine.compile(spec, llguidance.LLMatcher.grammar_from_lark(text)) for text in (lark, fuse_delimiters(lark))
    )
    rng = random.Random(seed)
    pieces = [
        '"',
        '"id"',
        '"name"',
        ":",
        ",",
        " ",
        "i",
        "d",
        "x",
        "name",
        '\\"',
        "\\",
        "é",
        '":',
        ',"',
        "nam",
        "\n",
        "|",
        "a|b",
    ]
    for _ in range(400):
        text = "".join(rng.choice(pieces) for _ in range(rng.randint(1, 9)))
        tokens = list(text.encode())
        first, second = before.matcher(), after.matcher()
        assert first.accept(tokens) == second.accept(tokens), text
        assert first.can_stop == second.can_stop, text
