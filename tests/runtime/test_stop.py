from __future__ import annotations

import random

import pytest
import regex

from sglite.errors import InvalidRequest
from sglite.runtime.stop import StopChecker, StopRegexTimeout, compile_stop_regex


def _run(pieces: list[str], texts: tuple[str, ...] = (), patterns: tuple[str, ...] = (), **kw: bool) -> tuple[str, str]:
    checker = StopChecker(
        texts, [regex.compile(p) for p in patterns], include_stop=kw.get("include", False), budget_s=1.0
    )
    out = ""
    for piece in pieces:
        text, match = checker.push(piece, armed=True)
        out += text
        if match is not None:
            return out, match.spec
    return out + checker.flush(), ""


@pytest.mark.parametrize("seed", range(30))
def test_any_cut_of_a_text_stops_where_the_whole_text_would(seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choice("ab\n") for _ in range(60))
    stops = tuple("".join(rng.choice("ab\n") for _ in range(rng.randint(2, 6))) for _ in range(3))
    ends = sorted((text.find(s) + len(s), text.find(s)) for s in stops if s in text)
    pieces, rest = [], text
    while rest:
        n = rng.randint(1, 5)
        pieces.append(rest[:n])
        rest = rest[n:]
    out, spec = _run(pieces, stops)
    if not ends:
        assert (out, spec) == (text, "")
    else:
        assert spec
        assert text.startswith(out)
        assert not any(s in out for s in stops)
        assert text[len(out) :].startswith(spec)


def test_the_stop_that_is_complete_first_wins() -> None:
    assert _run(["xabcd"], ("cd", "bc")) == ("xa", "bc")
    assert _run(["xabcd"], ("abcd", "bc")) == ("xa", "bc")
    assert _run(["xabcd"], ("bcd", "abcd", "cd")) == ("x", "abcd")


_PATTERNS = (
    "a+b", "ab|b", "b{2,}", "a.*b", "(a|b)\\1", "a*?b", "END", "b$", r"\bb\b", "a(?=b)", "b(?!a)", "(?>a+)b", "a++b",
    r"(?<=a)b", "(?:ba){2}", r"a\n", "^a", "(?m)^b", "(a)?b", "a{3}|b{3}",
)  # fmt: skip


def _grown(text: str, texts: tuple[str, ...], patterns: tuple[str, ...]) -> tuple[str, str]:
    """The rule itself: the text grows by a character at a time."""
    for size in range(1, len(text) + 1):
        found = [(text.find(s, 0, size), s) for s in texts if s in text[:size]]
        for pattern in patterns:
            hits = [m.start() for m in regex.finditer(pattern, text[:size]) if m.end() > m.start()]
            found += [(hits[0], pattern)] if hits else []
        if found:
            start = min(found)[0]
            return text[:start], {spec for at, spec in found if at == start}
    return text, {""}


@pytest.mark.parametrize("seed", range(300))
def test_where_a_text_stops_does_not_depend_on_how_it_was_cut(seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choice("aab\n END") for _ in range(40))
    texts = tuple("".join(rng.choice("ab\n") for _ in range(rng.randint(2, 5))) for _ in range(rng.randint(0, 2)))
    patterns = tuple(rng.sample(_PATTERNS, rng.randint(1, 2)))
    out, specs = _grown(text, texts, patterns)
    for longest in (1, 3, 9, 40):
        pieces, rest = [], text
        while rest:
            n = rng.randint(1, longest)
            pieces.append(rest[:n])
            rest = rest[n:]
        stopped, spec = _run(pieces, texts, patterns)
        assert stopped == out, (pieces, texts, patterns)
        assert spec in specs


@pytest.mark.parametrize("pattern", ["a*", "x?", "", "(?r)ab", r"\Gab", "(|a)"])
def test_a_regex_that_would_stop_anywhere_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidRequest):
        compile_stop_regex(pattern)


@pytest.mark.parametrize("pattern", [r"\b", "(?=l)", "(?<=l)", "$"])
def test_a_match_that_takes_nothing_neither_stops_nor_holds_back(pattern: str) -> None:
    assert _run(["hello", " world"], (), (pattern,)) == ("hello world", "")


def test_a_regex_stops_across_pieces_and_holds_back_only_what_may_match() -> None:
    checker = StopChecker((), [regex.compile(r"END\d+;")], include_stop=False, budget_s=1.0)
    assert checker.push("text EN", armed=True) == ("text ", None)
    assert checker.push("D4", armed=True) == ("", None)
    text, match = checker.push("2;rest", armed=True)
    assert (text, match.text) == ("", "END42;")


def test_a_look_behind_sees_what_was_given_out() -> None:
    assert _run(["abc", "x", "d"], (), (r"(?<=cx)d",)) == ("abcx", r"(?<=cx)d")


def test_a_partial_match_that_hides_a_whole_one_does_not_delay_it() -> None:
    assert _run(["ab"], (), (r"a.*z|b",)) == ("a", r"a.*z|b")


def test_include_stop_keeps_it() -> None:
    assert _run(["one.", "two"], (".",), include=True)[0] == "one."


def test_nothing_stops_before_it_is_armed() -> None:
    checker = StopChecker(("a",), [], include_stop=False, budget_s=1.0)
    assert checker.push("banana", armed=False) == ("banana", None)
    assert checker.push("ca", armed=True)[0] == "c"


def test_a_hostile_regex_runs_out_of_time() -> None:
    checker = StopChecker((), [regex.compile(r"(a+)+(b|c)$")], include_stop=False, budget_s=0.01)
    with pytest.raises(StopRegexTimeout):
        for _ in range(50):
            checker.push("a" * 50 + "!", armed=True)


def test_a_bad_regex_is_refused_with_its_reason() -> None:
    with pytest.raises(InvalidRequest, match="not a regular expression"):
        compile_stop_regex("[a")
    with pytest.raises(InvalidRequest, match="at most"):
        compile_stop_regex("a" * 5000)


@pytest.mark.parametrize(
    "pattern",
    ["(" * 400 + "a" + ")" * 400, "(?if)" + "ß" * 4000, "(a?){50000}", "(((a?){50}){50}){50}", "("],
)
def test_a_regex_that_costs_too_much_to_compile_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidRequest):
        compile_stop_regex(pattern)
