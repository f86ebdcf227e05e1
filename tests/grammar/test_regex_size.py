from __future__ import annotations

import pytest

from sglite.errors import GrammarTooLarge
from sglite.grammar import spec
from sglite.grammar.regex_size import regex_size


@pytest.mark.parametrize(
    ("pattern", "shortest", "reach", "expanded"),
    [
        ("abc", 3, 3, 3),
        ("a|bc{1000}", 1, 1001, 1002),
        ("(a{1000}){1000}", 1_000_000, 1_000_000, 1_000_000),
        ("(?i)a?b+", 1, 2, 2),
        ("[a-z]{3,5}x", 4, 4, 6),
        (r"\x{41}\p{L}{2}\.", 4, 4, 4),
        ("[]a]b[^]]", 3, 3, 3),
        (r"[\]]|[[a]b]c", 1, 2, 3),
        ("(?P<n>ab)*c", 1, 3, 3),
        ("é{2}", 4, 4, 4),
        ("^(x{2,})$", 2, 2, 2),
        ("", 0, 0, 0),
        ("(?:", 0, 0, 0),
    ],
)
def test_size_of_a_regex(pattern, shortest, reach, expanded):
    size = regex_size(pattern)
    assert (size.shortest, size.reach, size.expanded) == (shortest, reach, expanded)


def test_sizes_do_not_overflow():
    assert regex_size("(" * 30 + "a" + "{9999})" * 30).shortest == 1 << 40


def test_a_regex_without_a_short_text_is_refused():
    with pytest.raises(GrammarTooLarge, match="1000000 bytes"):
        spec.regex("(a{1000}){1000}")
