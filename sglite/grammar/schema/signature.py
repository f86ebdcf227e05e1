"""What is seen of a conjunction at one look, to prove that two share no value without multiplying them out."""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal

import msgspec

from sglite.grammar.schema.cases import NUMBER, OBJECT, Bound, Case
from sglite.grammar.schema.values import is_number

Range = tuple[Bound | None, Bound | None]  # None: without an end


class Signature(msgspec.Struct, frozen=True):
    """`tags`: per required key of its objects, the finite set of what it may be. `range`: of its numbers."""

    types: int
    tags: dict[str, frozenset[object]]
    range: Range

    def clashes_with(self, other: Signature) -> bool:
        """Proven: no value is in both."""
        common = self.types & other.types
        if not common:
            return True
        if common == OBJECT:
            return any(self.tags[name].isdisjoint(other.tags[name]) for name in self.tags.keys() & other.tags.keys())
        return common & ~NUMBER == 0 and ranges_are_apart([self.range, other.range])


def number_range(cases: Iterable[Case]) -> Range:
    """The least range that holds all numbers of the cases."""
    ranges = [_range_of(case) for case in cases if case.types & NUMBER]
    lows, highs = [low for low, _ in ranges], [high for _, high in ranges]
    least = min((b for b in lows if b is not None), key=lambda b: (b.value, b.open), default=None)
    most = max((b for b in highs if b is not None), key=lambda b: (b.value, not b.open), default=None)
    return None if None in lows else least, None if None in highs else most


def _range_of(case: Case) -> Range:
    if case.values is None:
        return case.low, case.high
    numbers = [value for value in case.values if is_number(value)]
    return (Bound(min(numbers), False), Bound(max(numbers), False)) if numbers else (None, None)


def ranges_are_apart(ranges: list[Range]) -> bool:
    """No number is in two of them."""
    ordered = sorted(ranges, key=lambda r: (r[0] is not None, Decimal(0) if r[0] is None else r[0].value))
    return all(_is_below(high, low) for (_, high), (low, _) in zip(ordered, ordered[1:], strict=False))


def _is_below(high: Bound | None, low: Bound | None) -> bool:
    if high is None or low is None:
        return False
    return high.value < low.value or (high.value == low.value and (high.open or low.open))
