"""Numbers that are checked as they are written: divisors too large for any grammar.

A beginning of a number is alive while some way to go on ends in a number that the rule allows. What a beginning can
become are intervals of values; a multiple is looked for in each, with whole numbers throughout: nothing is rounded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction

import msgspec

MAX_WHOLE_DIGITS = 24  # or what the rule's own numbers need; a longer number is not written
MAX_DECIMALS = 20  # beyond those of the rule's own numbers
_MAX_EXCLUDED = 6  # divisors that a number must not have: the search is exponential in their number
_NUMBER = re.compile(rb"(-?)([0-9]*)(\.?)([0-9]*)([eE]?)([-+0-9]*)")


class NumberRule(msgspec.Struct, frozen=True):
    """Between `low` and `high`, a multiple of `multiple` (if there is one) and of none of `not_multiples`."""

    fractions: bool  # False: written without a fraction
    low: Decimal | None = None
    high: Decimal | None = None
    low_open: bool = False
    high_open: bool = False
    multiple: Decimal | None = None
    not_multiples: tuple[Decimal, ...] = ()
    not_values: tuple[Decimal, ...] = ()
    exponents: bool = False  # only where the bounds ask for a sign and nothing else narrows

    @property
    def can_be_followed(self) -> bool:
        return len(self.not_multiples) <= _MAX_EXCLUDED

    @property
    def longest(self) -> int:
        """Characters of a number that is written as short as it can be from some beginning on."""
        rule = _Rule(self)
        return rule.whole_digits + rule.decimals + 2


class Numbers:
    """A number must satisfy one of several rules."""

    def __init__(self, rules: tuple[NumberRule, ...]) -> None:
        self._rules = tuple(map(_Rule, rules))

    def is_alive(self, beginning: bytes) -> bool:
        """Whether a number can begin so (b"": at all). `beginning` is one as far as JSON's syntax goes."""
        return any(rule.is_alive(beginning) for rule in self._rules)

    def holds(self, number: bytes) -> bool:
        """False, too, where it is not complete."""
        return any(rule.holds(number) for rule in self._rules)


class _Rule:
    """Everything times 10 ** scale."""

    def __init__(self, rule: NumberRule) -> None:
        self.rule = rule
        given = [rule.low, rule.high, rule.multiple, *rule.not_multiples, *rule.not_values]
        numbers = [Fraction(number) for number in given if number is not None]
        self.decimals = max(map(_decimals, numbers), default=0) + MAX_DECIMALS
        whole = sum(len(str(abs(int(number)))) for number in numbers)
        self.whole_digits = max(MAX_WHOLE_DIGITS, whole + 2)
        self.unit = 10**self.decimals
        self.low = None if rule.low is None else self._scaled(rule.low) + rule.low_open
        self.high = None if rule.high is None else self._scaled(rule.high) - rule.high_open
        smallest = 1 if rule.fractions else self.unit
        self.step = smallest if rule.multiple is None else math.lcm(smallest, self._scaled(rule.multiple))
        factors = [math.lcm(self.step, self._scaled(n)) // self.step for n in rule.not_multiples]
        self.factors = list(dict.fromkeys(factors))
        self.excluded = {self._scaled(value) for value in rule.not_values}
        # Of so many multiples in a row, more survive the factors than there are excluded values.
        self.enough = (len(self.excluded) + 1) << len(self.factors)

    def _scaled(self, value: Decimal) -> int:
        found = Fraction(value) * self.unit
        assert found.denominator == 1
        return found.numerator

    def is_alive(self, beginning: bytes) -> bool:
        parts = _NUMBER.fullmatch(beginning)
        if parts is None:
            return False
        minus, whole, point, fraction, exponent, _ = parts.groups()
        if exponent:
            return self.rule.exponents and self.holds(minus + whole + point + fraction)
        if point and not self.rule.fractions:
            return False
        if minus and whole == b"0" and not self.rule.fractions:
            return False
        intervals = self._intervals(whole, fraction if point else None)
        if minus and not whole and not self.rule.fractions:  # no -0
            intervals = iter([(self.unit, 10**self.whole_digits * self.unit)])
        for first, after in intervals:
            if self._any_within(1 - after, -first) if minus else self._any_within(first, after - 1):
                return True
        return not beginning and self.is_alive(b"-")

    def _intervals(self, whole: bytes, fraction: bytes | None) -> Iterator[tuple[int, int]]:
        """The magnitudes that may come of it, from the first to before the second."""
        if len(whole) > self.whole_digits:
            return
        if fraction is not None:
            if len(fraction) <= self.decimals:
                width = 10 ** (self.decimals - len(fraction))
                first = int(whole + fraction) * width
                yield first, first + width
            elif not fraction[self.decimals :].strip(b"0"):
                first = int(whole + fraction[: self.decimals])
                yield first, first + 1
            return
        if not whole:
            yield 0, 10**self.whole_digits * self.unit
            return
        value = int(whole)
        for more in range(self.whole_digits - len(whole), 0, -1) if value else ():  # the widest one will mostly do
            yield value * 10**more * self.unit, (value + 1) * 10**more * self.unit
        yield value * self.unit, (value + 1) * self.unit

    def _any_within(self, first: int, last: int) -> bool:
        first = first if self.low is None else max(first, self.low)
        last = last if self.high is None else min(last, self.high)
        times = -(-first // self.step)
        for count in range(times, min(last // self.step, times + self.enough) + 1):
            if count * self.step not in self.excluded and all(count % factor for factor in self.factors):
                return True
        return False

    def holds(self, number: bytes) -> bool:
        parts = _NUMBER.fullmatch(number)
        if parts is None or not parts[2] or (parts[3] and not parts[4]):
            return False
        minus, whole, point, fraction, exponent, power = parts.groups()
        if exponent:
            return self.rule.exponents and power[-1:].isdigit() and self.holds(minus + whole + point + fraction)
        if (point or (minus and whole == b"0")) and not self.rule.fractions:
            return False
        if fraction[self.decimals :].strip(b"0"):
            return False
        fraction = fraction[: self.decimals]
        value = int(whole + fraction) * 10 ** (self.decimals - len(fraction))
        value = -value if minus else value
        return self._any_within(value, value)


def _decimals(value: Fraction) -> int:
    """Of a number that has finitely many."""
    twos = fives = 0
    rest = value.denominator
    while rest % 2 == 0:
        rest //= 2
        twos += 1
    while rest % 5 == 0:
        rest //= 5
        fives += 1
    return max(twos, fives)
