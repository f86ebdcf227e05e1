from __future__ import annotations

import time

from sglite.grammar.automaton.pace import Pace
from sglite.grammar.automaton.positions import Machine

LARK = 'start: "[" WORD ("," WORD)* "]"\nWORD: /"[a-z]+"/\n'


def test_reading_pauses_and_the_positions_that_are_met_later_do_not() -> None:
    calls: list[float] = []
    sizes = {"most_regexes": (10_000, 10_000), "most_positions": 1000, "reach": 16}
    machine = Machine(LARK, pause=lambda: calls.append(0.0), **sizes)  # type: ignore[arg-type]
    read = len(calls)
    assert read > 10
    assert machine.follow(machine.start, b'["ab","c"]') is not None
    assert len(calls) == read
    assert Machine(LARK, **sizes).size == Machine(LARK, pause=Pace(), **sizes).size  # type: ignore[arg-type]


def test_one_who_works_leaves_most_of_the_time_to_others() -> None:
    pace, slept = Pace(), []
    original = time.sleep
    try:
        time.sleep = slept.append  # type: ignore[assignment]
        end = time.perf_counter() + 0.005
        while time.perf_counter() < end:
            pace()
    finally:
        time.sleep = original
    assert 5 <= len(slept) <= 50
    assert sum(slept) > 0.012
