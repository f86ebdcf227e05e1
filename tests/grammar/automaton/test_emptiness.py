from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglite.grammar.automaton import emptiness
from sglite.grammar.automaton.emptiness import is_alive
from sglite.grammar.automaton.regex import NotTold, Regex, Regexes

REGEXES = Regexes(200_000)
_LEAVES = [REGEXES.parse(text) for text in ("a", "b", "[ab]*", "a{2,3}", "(?:ab)+", "[^a]", "")]
EXPRESSIONS = st.recursive(
    st.sampled_from(_LEAVES),
    lambda inner: (
        st.lists(inner, min_size=2, max_size=3).map(REGEXES.both)
        | st.lists(inner, min_size=2, max_size=3).map(REGEXES.union)
        | st.lists(inner, min_size=2, max_size=3).map(REGEXES.sequence)
        | inner.map(REGEXES.complement)
    ),
    max_leaves=6,
)


def has_text(regex: Regex) -> bool:
    """By way of every rest there is, over two letters and all others."""
    seen, to_do = {regex}, [regex]
    while to_do:
        here = to_do.pop()
        if here.nullable:
            return True
        for byte in b"abc\xc3\xa9\xe6\xf0\x90\x80":
            rest = REGEXES.rest(here, byte)
            if rest not in seen:
                seen.add(rest)
                to_do.append(rest)
    return False


@given(EXPRESSIONS)
def test_alive_is_what_has_a_text(regex: Regex) -> None:
    assert is_alive(REGEXES, regex) == has_text(regex)


def test_a_search_that_is_too_long_is_given_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    regexes = Regexes(10_000)
    long = regexes.both((regexes.parse("[ab]{40}"), regexes.parse("a*")))
    monkeypatch.setattr(emptiness, "_MOST_LOOKS", 5)
    for _ in range(2):
        with pytest.raises(NotTold):
            is_alive(regexes, long)
    assert len(regexes.not_told) == 1
