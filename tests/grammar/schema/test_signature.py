"""What one look proves of branches: disjoint tags and disjoint ranges."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sglite.errors import SgliteError
from sglite.grammar.schema import prepare
from sglite.grammar.schema.cases import FRACTION, INTEGER, NUMBER, Bound, Case
from sglite.grammar.schema.signature import number_range, ranges_are_apart
from tests.grammar.schema.byte_engine import ByteEngine


def _accepts(schema: Any, *values: Any) -> list[bool]:
    engine = ByteEngine(prepare(json.dumps(schema)))
    return [engine.accepts(value) for value in values]


def _range(low: int | None, high: int | None, *, open_low: bool = False, open_high: bool = False) -> Any:
    return None if low is None else Bound(low, open_low), None if high is None else Bound(high, open_high)


@pytest.mark.parametrize(
    ("ranges", "apart"),
    [
        ([_range(0, 1), _range(2, 3)], True),
        ([_range(2, None), _range(None, 1)], True),
        ([_range(0, 2), _range(2, 3)], False),
        ([_range(0, 2, open_high=True), _range(2, 3)], True),
        ([_range(0, 2), _range(2, 3, open_low=True)], True),
        ([_range(0, 9), _range(2, 3), _range(10, 11)], False),
        ([_range(None, 0), _range(None, 5), _range(6, 7)], False),
        ([_range(0, None), _range(5, 6)], False),
    ],
)
def test_ranges(ranges: list[Any], apart: bool) -> None:
    assert ranges_are_apart(ranges) is apart
    assert ranges_are_apart(ranges[::-1]) is apart


def test_the_range_of_several_cases_holds_all_of_their_numbers() -> None:
    cases = [Case(types=INTEGER, low=Bound(3, True), high=Bound(9, False)), Case(types=NUMBER, values=(1, 4))]
    assert number_range(cases) == (Bound(1, False), Bound(9, False))
    assert number_range([*cases, Case(types=FRACTION, low=Bound(0, False))]) == (Bound(0, False), None)


def test_one_of_many_ranges_is_proven_at_one_look() -> None:
    branches = [{"type": "integer", "minimum": 10 * i, "maximum": 10 * i + 8} for i in range(200)]
    assert _accepts({"oneOf": branches}, 0, 1998, 1558, 9, 1999, -1) == [True, True, True, False, False, False]


def test_ranges_that_meet_are_still_exclusive() -> None:
    branches = [{"type": "integer", "minimum": 0, "maximum": 5}, {"type": "integer", "minimum": 5, "maximum": 9}]
    assert _accepts({"oneOf": branches}, 4, 5, 6) == [True, False, True]


def test_too_many_branches_that_overlap_are_refused() -> None:
    branches = [{"type": "integer", "minimum": i, "maximum": i + 50} for i in range(100)]
    with pytest.raises(SgliteError):
        prepare(json.dumps({"oneOf": branches}))
