"""Bounds of many digits, whose ranges are written without groups in groups."""

from __future__ import annotations

import random
import re
from decimal import Decimal

import pytest

from sglite.grammar.schema import numbers
from sglite.grammar.schema.cases import Bound


@pytest.fixture
def always_long(monkeypatch) -> None:
    monkeypatch.setattr(numbers, "MOST_NESTED", 0)


def _fits(lark: str, text: str) -> bool:
    """Of a Lark expression of regexes under & and |, as `decimal_range` writes them."""
    pieces = re.split(r"(/(?:[^/\\]|\\.)+/|\"[^\"]*\")", lark)
    # `"-" X` is a text that begins with a minus; the tests stay above zero
    assert '"-"' not in lark
    words = [repr(bool(re.fullmatch(p[1:-1], text))) if p[:1] == "/" else p for p in pieces]
    return bool(eval("".join(words).replace("&", " and ").replace("|", " or ")))


def test_integers_between(always_long) -> None:
    for low in range(0, 1300, 37):
        for high in (low, low + 1, low + 9, low + 100, 1999, 12_345):
            if high >= low:
                expression = re.compile(str(numbers.integer_range(low, high)))
                for value in {0, 1, 9, 10, 99, 100, 999, 1000, low - 1, low, low + 1, high - 1, high, high + 1, 99_999}:
                    assert bool(expression.fullmatch(str(value))) == (low <= value <= high), (low, high, value)


@pytest.mark.parametrize("is_open", [False, True])
def test_decimals_above_and_below(always_long, is_open: bool) -> None:
    rng = random.Random(0)
    texts = ["0", "1", "0.5", "0.25", "0.250", "0.2499", "0.2501", "0.001", "0.0010", "0.00101", "0.9", "0.99", "12.05"]
    texts += [f"{rng.randrange(3)}.{rng.randrange(1000):03}" for _ in range(30)]
    for bound in map(Decimal, texts):
        low = numbers.decimal_range(Bound(bound, is_open), Bound(Decimal(10**6), False))
        high = numbers.decimal_range(Bound(Decimal(0), False), Bound(bound, is_open))
        for text in texts:
            value = Decimal(text)
            assert low is None or _fits(low, text) == (value > bound or (value == bound and not is_open)), (low, text)
            if high is not None and bound:
                assert _fits(high, text) == (value < bound or (value == bound and not is_open)), (bound, text)


@pytest.mark.parametrize("value", ["5e-324", "1e-200", "1.7976931348623157e308", "1e300"])
def test_bounds_at_the_ends_of_doubles(value: str) -> None:
    bound = Decimal(value)
    for text, inside in ((format(bound, "f"), True), (format(bound * 2, "f"), True), (format(bound / 2, "f"), False)):
        above = numbers.decimal_range(Bound(bound, False), None)
        assert above is not None
        assert _fits(above, text) == inside
