from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from sglite.runtime.scheduler.odds import RunOdds


@dataclass
class Place:
    draws: int = 0
    runs: int = 0
    hits: int = 0
    likely: tuple[int, ...] = ()
    ahead: int | None = 0
    followed: Any = None


def row(place: Place | None, *, num_ahead: int = 0) -> Any:
    state = None if place is None else SimpleNamespace(said=place)
    return SimpleNamespace(matcher=SimpleNamespace(state=state), num_ahead=num_ahead)


def test_each_place_learns_what_follows_it() -> None:
    odds, digit, inside = RunOdds(), Place(), Place()
    for _ in range(100):
        odds.drew([digit, inside], [True, False], [row(digit), row(inside)])
    assert odds.expected([row(digit)]) > 0.95
    assert odds.expected([row(inside)]) < 0.05
    assert 0.9 < odds.expected([row(digit), row(inside)]) < 1.05


def test_a_new_place_and_a_matcher_without_places_are_like_the_others() -> None:
    odds = RunOdds()
    for _ in range(200):
        places = [Place(), Place()]
        odds.drew([None, None, *places], [True, False, False, False], [row(None), row(None), *map(row, places)])
    assert 0.2 < odds.expected([row(Place())]) < 0.3
    assert 0.2 < odds.expected([row(None)]) < 0.3


def test_rows_without_a_grammar_and_known_draws_expect_nothing() -> None:
    odds, digit = RunOdds(), Place(10, 10)
    odds.drew([digit], [True], [row(digit)])
    assert odds.expected([SimpleNamespace(matcher=None, num_ahead=0)]) == 0.0  # type: ignore[list-item]
    assert odds.expected([row(digit, num_ahead=1)]) == 0.0
    odds.drew([], [])


def test_many_rows_are_judged_by_the_first_ones() -> None:
    odds, places = RunOdds(), [Place() for _ in range(300)]
    for _ in range(50):
        rows = [row(place) for place in places]
        odds.drew(RunOdds.places(one.matcher for one in rows), [True, False] * 150, rows)
    assert 120 < odds.expected([row(place) for place in places]) < 180
    assert [place.draws for place in places[:64]] == [50] * 64
    assert not any(place.draws for place in places[64:])


def test_rows_without_a_grammar_do_not_wait_for_the_text_of_others() -> None:
    odds, digit = RunOdds(), Place(10, 10)
    free = SimpleNamespace(matcher=None, num_ahead=0)
    assert odds.expected([row(digit)]) > 0.8
    assert odds.expected([row(digit), free]) == 0.0  # type: ignore[list-item]
