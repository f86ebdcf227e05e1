"""Sets of strings are told apart as Python's own search tells them apart."""

from __future__ import annotations

from itertools import product

import pytest

from sglite.grammar.schema.languages import Languages
from sglite.grammar.schema.pattern_text import found_in, length_expression, pattern_expression
from sglite.grammar.schema.strings import ANY_STRING, one_of

_PATTERNS = ["^a", "b$", "^[^b]*$", "a.b", "^(ab|ba)+$", "c", "é|ä", "^[ä-ü]", r"^\S{2,3}$", "^$"]
_WORDS = ["".join(word) for n in range(5) for word in product("abc\néü", repeat=n)]


def _by_search(patterns: list[str]) -> set[frozenset[int]]:
    return {frozenset(i for i, p in enumerate(patterns) if found_in(p, word)) for word in _WORDS}


@pytest.mark.parametrize("count", [1, 2, 3])
def test_patterns_are_told_apart_as_words_tell_them_apart(count: int) -> None:
    languages = Languages()
    for start in range(len(_PATTERNS)):
        patterns = [_PATTERNS[(start + 3 * i) % len(_PATTERNS)] for i in range(count)]
        told = languages.told_apart([ANY_STRING], [pattern_expression(p) for p in patterns])
        assert told == _by_search(patterns), patterns


def test_a_base_narrows_what_is_told_apart() -> None:
    languages = Languages()
    options = [pattern_expression("a"), pattern_expression("b")]
    assert languages.told_apart([one_of(["xa", "ya"])], options) == {frozenset({0})}
    assert languages.told_apart([ANY_STRING, ~pattern_expression("a|b")], options) == {frozenset()}
    assert languages.told_apart([length_expression(0, 1)], options) == {frozenset(), frozenset({0}), frozenset({1})}


@pytest.mark.parametrize(
    ("parts", "empty"),
    [
        (["^a", "^b"], True),
        (["a", "b"], False),
        (["^[0-9]+$", "[a-z]"], True),
        (["^(aa)+$", "^(aaa)+$"], False),
        (["^(aa)+$", "^a(aa)*$"], True),
        (["x{40}", "^.{0,39}$"], True),
        (["^[ä-ü]+$", "[é]"], False),
        (["^[ä-ü]+$", "[a-zßö]"], False),
        (["^[ä-ü]+$", "[a-zÿ]"], True),
        (["^\ud7ff$", "^[^\ud7ff]$"], True),
    ],
)
def test_emptiness(parts: list[str], empty: bool) -> None:
    assert Languages().is_empty([pattern_expression(part) for part in parts]) is empty


def test_surrogates_are_no_characters() -> None:
    assert Languages().is_empty([pattern_expression(r"^[\uD800-\uDFFF]+$"), length_expression(1, 1)]) is True


def test_complements() -> None:
    languages = Languages()
    a = pattern_expression("a")
    assert languages.is_empty([a, ~a]) is True
    assert languages.is_empty([~a, ~pattern_expression("^[^a]*$")]) is True
    assert languages.is_empty([ANY_STRING, ~one_of(["", "x"]), length_expression(0, 0)]) is True
    assert languages.is_empty([ANY_STRING, ~one_of(["x"]), length_expression(1, 1)]) is False


@pytest.mark.parametrize("pattern", [r"(?=a)b", r"\p{L}", "(?:" + "|".join(f"w{i}" for i in range(2000)) + ")"])
def test_what_is_not_followed_is_not_told(pattern: str) -> None:
    assert Languages().is_empty([pattern_expression(pattern), pattern_expression("^q")]) is None


def test_a_search_that_takes_long_ends() -> None:
    many = [pattern_expression(f"{chr(97 + i)}.{{{9 + i}}}{chr(110 + i)}") for i in range(8)]
    assert Languages().told_apart([ANY_STRING], many) is None
