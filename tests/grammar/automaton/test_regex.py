from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglite.grammar.automaton.regex import Regexes, TooManyStates
from sglite.grammar.automaton.utf8 import byte_sequences
from sglite.grammar.spelling import UNIT

NUMBER = r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?(?:[0-9]{1,2}|[12][0-9]{2}))?"


def takes(regexes: Regexes, expression: str, text: str) -> bool:
    return regexes.follow(regexes.parse(expression), text.encode()).nullable


@given(st.text("01e+-.9", max_size=6))
def test_it_takes_what_pythons_re_takes(text: str) -> None:
    assert takes(Regexes(10_000), NUMBER, text) == bool(re.fullmatch(NUMBER, text))


@given(st.integers(0, 0x10FFFF), st.integers(0, 0x10FFFF), st.characters(exclude_categories=["Cs"]))
def test_byte_sequences_are_the_encodings_of_a_range(one: int, other: int, char: str) -> None:
    low, high = sorted((one, other))
    data = char.encode()
    inside = any(
        len(sequence) == len(data) and all(a <= byte <= b for (a, b), byte in zip(sequence, data, strict=True))
        for sequence in byte_sequences(low, high)
    )
    assert inside == (low <= ord(char) <= high)


def test_equal_rests_are_one_object() -> None:
    regexes = Regexes(10_000)
    digits = regexes.parse("[0-9]+")
    assert regexes.follow(digits, b"1") is regexes.follow(digits, b"123")
    bounded = regexes.parse(f"(?:{UNIT}){{0,9}}")
    assert regexes.follow(bounded, "aé".encode()) is regexes.follow(bounded, rb"\n\u001f")


def test_intersections_and_complements() -> None:
    regexes = Regexes(10_000)
    other = regexes.both((regexes.parse("[a-z]*"), regexes.complement(regexes.parse("ab|c"))))
    assert [regexes.follow(other, text).nullable for text in (b"", b"a", b"ab", b"c", b"abc", b"1")] == [
        True, True, False, False, True, False,
    ]  # fmt: skip
    assert regexes.follow(other, b"b") is regexes.parse("[a-z]*")


@pytest.mark.parametrize(
    "expression",
    [
        r"\w",
        r"\bab",
        r"[\d-z]",
        r"\p{L}",
        "[[:alpha:]]",
        "[a&&b]",
        "^a",
        "a$",
        "(?i:a)",
        "(?P<x>a)",
        "[a",
        "(?:a",
        "(a",
        "a{,2}",
    ],
)
def test_what_is_not_surely_understood_is_refused(expression: str) -> None:
    with pytest.raises(ValueError):
        Regexes(1000).parse(expression)


def test_the_number_of_rests_is_bounded() -> None:
    with pytest.raises(TooManyStates):
        Regexes(20).parse("abcdefghijklmnopqrstuvwxyz")


@pytest.mark.parametrize(
    ("expression", "text", "takes_it"),
    [
        ("(a|b)+c", "abac", True),
        ("a.c", "abc", True),
        ("a.c", "a\nc", False),
        ("(?s:a.c)|.", "a\nc", True),
        ("(?s:a)b.", "ab\n", False),
        (r"\d+", "1٣９", True),
        (r"\d", "x", False),
        (r"\D", "x", True),
        (r"[\d.]+", "1.2", True),
        (r"[^a]", "b", True),
        (r"\s\S", "\u00a0x", True),
        (r"a+?b??", "aa", True),
    ],
)
def test_points_groups_and_named_classes(expression: str, text: str, takes_it: bool) -> None:
    assert takes(Regexes(10_000), expression, text) == takes_it
