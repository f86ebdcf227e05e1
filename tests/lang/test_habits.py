"""What is likely to follow a call: what followed it the last times."""

from __future__ import annotations

from sglite.lang.habits import Habits
from sglite.lang.nodes import Gen, Text

PLACE = (0, 1)
A, B = (Text("a"), Gen(name="x")), (Text("b"), Gen(name="x"))


def test_what_was_the_same_twice_is_likely() -> None:
    habits = Habits()
    habits.saw(PLACE, A)
    assert habits.likely(PLACE) == ()
    habits.saw(PLACE, A)
    assert habits.likely(PLACE) == A
    assert habits.likely(PLACE, A[:1]) == A[1:]
    assert habits.likely(PLACE, B[:1]) == ()
    assert habits.likely((0, 2)) == ()


def test_what_was_wrong_has_to_be_the_same_more_often() -> None:
    habits = Habits()
    for nodes in (A, A, B, B):
        habits.saw(PLACE, nodes)
    assert habits.likely(PLACE) == ()
    habits.saw(PLACE, B)
    assert habits.likely(PLACE) == B


def test_long_texts_are_not_kept() -> None:
    habits, long = Habits(), (Text("long " * 1000), Gen(name="x"))
    for _ in range(3):
        habits.saw(PLACE, long)
    assert habits.likely(PLACE) == ()
