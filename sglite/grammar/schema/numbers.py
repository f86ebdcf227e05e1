"""Ranges and multiples of numbers as regexes over their plain decimal text.

Integers have any width; decimals any number of digits, compared digit by digit. An integer is written without
a fraction. Exponents are in where the range only asks for a sign: their value is then plain to see.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from fractions import Fraction
from itertools import count

from sglite.grammar.schema.cases import FRACTION, INTEGER, Bound, Case
from sglite.grammar.schema.values import identity, is_number

_RUN = re.compile(r"(\d)\1{3,}")
DIGITS = "[0-9]*"
NATURAL = "(?:0|[1-9][0-9]*)"
ANY_INTEGER = "(?:0|-?[1-9][0-9]*)"
FRACTION_PART = r"(?:\.[0-9]+)?"
# Up to 1e299: a double holds it.
EXPONENT = "(?:[eE][+-]?(?:[0-9]{1,2}|[12][0-9]{2}))?"
ANY_NUMBER = rf"-?{NATURAL}{FRACTION_PART}{EXPONENT}"
# A Lark expression: no exponent, no zero that could be left out.
ONE_SPELLING = r"/(?:0|-?[1-9][0-9]*|-?(?:0|[1-9][0-9]*)\.[0-9]*[1-9])/"
MOST_NESTED = 40  # groups within each other; the engine's regex reader takes 250
MAX_DIVISOR = 20_000  # llguidance makes a lexer state per remainder: 0.1 s at 10,000, 13 s at 1,000,000


# --- integers


def integer_range(low: int | None, high: int | None) -> str | None:
    """A regex of the integers from `low` to `high`, None where there are none."""
    if low is not None and high is not None and low > high:
        return None
    if low is None and high is None:
        return ANY_INTEGER
    parts = []
    if low is None or low < 0:
        least = 1 if high is None or high >= 0 else -high
        parts.append("-" + _natural_range(least, None if low is None else -low))
    if high is None or high >= 0:
        parts.append(_natural_range(max(low or 0, 0), high))
    return f"(?:{'|'.join(parts)})"


def _natural_range(low: int, high: int | None) -> str:
    """0 <= low <= high."""
    if low == 0:
        rest = _natural_range(1, high) if high is None or high >= 1 else None
        return f"(?:0|{rest})" if rest else "0"
    first = str(low)
    if high is None:
        return f"(?:{_at_least(first)}|[1-9][0-9]{{{len(first)},}})"
    last = str(high)
    if len(first) == len(last):
        return _between(first, last)
    parts = [_at_least(first)]
    if len(last) - len(first) > 1:
        parts.append(f"[1-9][0-9]{{{len(first)},{len(last) - 2}}}")
    parts.append(_at_most(last))
    return f"(?:{'|'.join(parts)})"


def _digit(low: int, high: int) -> str:
    return str(low) if low == high else f"[{low}-{high}]"


def _free(width: int) -> str:
    return "" if width == 0 else "[0-9]" if width == 1 else f"[0-9]{{{width}}}"


def _at_least(digits: str) -> str:
    """Texts of the same width, first digit not 0, that are not below."""
    return _between(digits, "9" * len(digits))


def _at_most(digits: str) -> str:
    return _between("1" + "0" * (len(digits) - 1), digits)


def _between(first: str, last: str) -> str:
    """Digit texts of one width from `first` to `last`."""
    if not first:
        return ""
    width = len(first) - 1
    if set(first[1:]) <= {"0"} and set(last[1:]) <= {"9"}:
        return _digit(int(first[0]), int(last[0])) + _free(width)
    if width > MOST_NESTED:
        return _long_between(first, last)
    a, b = int(first[0]), int(last[0])
    if a == b:
        return first[0] + _between(first[1:], last[1:])
    parts = [first[0] + _between(first[1:], "9" * width)]
    if b - a > 1:
        parts.append(_digit(a + 1, b - 1) + _free(width))
    parts.append(last[0] + _between("0" * width, last[1:]))
    return f"(?:{'|'.join(parts)})"


def _long_between(first: str, last: str) -> str:
    """The same without groups in groups: which first digit differs, for each place that it may have."""
    same = next((i for i, (a, b) in enumerate(zip(first, last, strict=True)) if a != b), len(first))
    if same == len(first):
        return _spelled(first)
    parts = [_spelled(first), _spelled(last)]
    for i in range(same, len(first)):
        free = _free(len(first) - i - 1)
        a, b = int(first[i]), int(last[i])
        if i == same:
            parts += [_spelled(first[:i]) + _digit(a + 1, b - 1) + free] if b - a > 1 else []
            continue
        parts += [_spelled(first[:i]) + _digit(a + 1, 9) + free] if a < 9 else []
        parts += [_spelled(last[:i]) + _digit(0, b - 1) + free] if b else []
    return f"(?:{'|'.join(parts)})"


def _spelled(digits: str) -> str:
    """The digits as a regex that is short where one is repeated."""
    return _RUN.sub(lambda run: f"{run[1]}{{{len(run[0])}}}", digits)


# --- decimals


def decimal_range(low: Bound | None, high: Bound | None) -> str | None:
    """A Lark expression of the plain decimals within the bounds, None where there are none."""
    if low is None and high is None:
        return _lark(ANY_NUMBER)
    sign = _sign_only(low, high)
    if sign is not None:
        return _lark(sign)
    parts = []
    if low is None or low.value < 0:
        least = Bound(0, False) if high is None or high.value > 0 else Bound(abs(high.value), high.open)
        most = None if low is None else Bound(-low.value, low.open)
        parts.append(f'"-" {_magnitude(least, most)}')
    if high is None or high.value >= 0:
        least = low if low is not None and low.value >= 0 else Bound(0, False)
        if not (high is not None and high.value == 0 and high.open):
            parts.append(_magnitude(least, high))
    return f"({' | '.join(parts)})" if parts else None


def _sign_only(low: Bound | None, high: Bound | None) -> str | None:
    """The regex of a range that is one whole side of zero, exponents included."""
    if low is not None and high is None and low.value == 0:
        sign, is_open = "", low.open
    elif high is not None and low is None and high.value == 0:
        sign, is_open = "-", high.open
    else:
        return None
    above = rf"(?:[1-9][0-9]*{FRACTION_PART}|0\.[0-9]*[1-9][0-9]*){EXPONENT}"
    if is_open:
        return sign + above
    return rf"(?:{NATURAL}{FRACTION_PART}{EXPONENT})" if not sign else rf"(?:-?0(?:\.0+)?|-{above})"


def _magnitude(low: Bound, high: Bound | None) -> str:
    parts = [] if low.value == 0 and not low.open else [_lark(_decimal_at_least(low))]
    if high is not None:
        parts.append(_lark(_decimal_at_most(high)))
    if not parts:
        return _lark(NATURAL + FRACTION_PART)
    return parts[0] if len(parts) == 1 else f"({' & '.join(parts)})"


def _split(value: int | Decimal) -> tuple[int, str]:
    whole, _, fraction = format(Decimal(value), "f").partition(".")
    return int(whole), fraction.rstrip("0")


def _decimal_at_least(bound: Bound) -> str:
    whole, fraction = _split(bound.value)
    above = _natural_range(whole + 1, None) + FRACTION_PART
    if not fraction:
        same = r"\.[0-9]*[1-9][0-9]*" if bound.open else FRACTION_PART
    else:
        same = r"\." + _fraction_at_least(fraction, bound.open)
    return f"(?:{above}|{whole}{same})"


def _fraction_at_least(digits: str, is_open: bool) -> str:
    if not digits:
        return f"{DIGITS}[1-9]{DIGITS}" if is_open else DIGITS
    if len(digits) > MOST_NESTED:
        more = [_spelled(digits[:i]) + _digit(int(d) + 1, 9) + DIGITS for i, d in enumerate(digits) if d != "9"]
        return f"(?:{'|'.join([*more, _spelled(digits) + _fraction_at_least('', is_open)])})"
    first = int(digits[0])
    parts = [f"{_digit(first + 1, 9)}{DIGITS}"] if first < 9 else []
    parts.append(digits[0] + _fraction_at_least(digits[1:], is_open))
    return f"(?:{'|'.join(parts)})"


def _decimal_at_most(bound: Bound) -> str:
    whole, fraction = _split(bound.value)
    parts = [_natural_range(0, whole - 1) + FRACTION_PART] if whole > 0 else []
    if fraction:
        parts.append(rf"{whole}(?:\.{_fraction_at_most(fraction, bound.open)})?")
    elif not bound.open:
        parts.append(rf"{whole}(?:\.0+)?")
    return f"(?:{'|'.join(parts)})"


def _fraction_at_most(digits: str, is_open: bool) -> str:
    """Non-empty digit texts whose value as a fraction is not above; `digits` does not end in 0."""
    if len(digits) > MOST_NESTED:
        less = [_spelled(digits[:i]) + _digit(0, int(d) - 1) + DIGITS for i, d in enumerate(digits) if d != "0"]
        begun = [_spelled(digits[:i]) for i in range(1, len(digits))]
        return f"(?:{'|'.join([*less, *begun, *([] if is_open else [_spelled(digits) + '0*'])])})"
    first = int(digits[0])
    parts = [f"{_digit(0, first - 1)}{DIGITS}"] if first else []
    if len(digits) > 1:
        parts.append(f"{first}(?:{_fraction_at_most(digits[1:], is_open)})?")
    else:
        # Equal so far, and nothing of the bound is left: only zeros may follow.
        parts.extend([] if is_open else [f"{first}0*"])
    return f"(?:{'|'.join(parts)})"


# --- a case's numbers


def number_expression(case: Case) -> str | None:
    """A Lark expression of the numbers of a case without multipleOf, None where there are none."""
    parts = []
    if case.types & INTEGER and not case.types & FRACTION:
        text = integer_range(*case.integer_range())
        if text is None:
            return None
        parts.append(_lark(text))
    else:
        text = decimal_range(case.low, case.high)
        if text is None:
            return None
        parts.append(text)
        if not case.types & INTEGER:
            parts.append(_lark(r"-?[0-9]+\.[0-9]*[1-9][0-9]*"))
    excluded = sorted({identity(v) for v in case.not_values if is_number(v)}, key=str)
    for _, value in excluded:  # type: ignore[misc]
        parts.append(f"~{_lark(_every_spelling(value))}")
        parts.append(_lark("[^eE]*"))  # an exponent would be one more spelling
    return parts[0] if len(parts) == 1 else f"({' & '.join(dict.fromkeys(parts))})"


def _every_spelling(value: Decimal) -> str:
    """The plain spellings of one number."""
    sign = "-" if value < 0 else "-?" if value == 0 else ""
    whole, fraction = _split(abs(value))
    return rf"{sign}{whole}\.{fraction}0*" if fraction else rf"{sign}{whole}(?:\.0*)?"


def common_multiple(multiples: tuple[int | Decimal, ...]) -> Decimal:
    """The least number that all of them divide."""
    exact = [Fraction(m) for m in multiples]  # Decimal's own arithmetic rounds to 28 digits
    common = Fraction(math.lcm(*(m.numerator for m in exact)), math.gcd(*(m.denominator for m in exact)))
    scale = next(n for n in count() if 10**n % common.denominator == 0)
    digits = str(common.numerator * (10**scale // common.denominator))
    return Decimal((0, tuple(map(int, digits)), -scale))


def multiple_expression(divisor: Decimal, *, integers_only: bool) -> str | None:
    """A Lark expression of the multiples of `divisor` that their last digits tell, None for any other divisor."""
    if divisor == divisor.to_integral_value():
        return _integer_multiple(int(divisor))
    if integers_only:
        return _integer_multiple(divisor.as_integer_ratio()[0])
    exponent = -int(divisor.as_tuple().exponent)
    digits = int(Fraction(divisor) * 10**exponent)
    if 10**exponent % digits or 10**exponent // digits > 1000:
        return None
    if digits == 1:
        return _lark(rf"-?{NATURAL}(?:\.[0-9]{{1,{exponent}}}0*)?")
    endings = [f"{n:0{exponent}d}".rstrip("0") for n in range(digits, 10**exponent, digits)]
    return _lark(rf"-?{NATURAL}(?:\.(?:(?:{'|'.join(endings)})0*|0+))?")


# Digit texts (leading zeros allowed) whose value 3 divides: what the remainder automaton accepts.
_BY_3 = (
    "(?:[0369]|[147][0369]*[258]|(?:[258]|[147][0369]*[147])(?:[0369]|[258][0369]*[147])*(?:[147]|[258][0369]*[258]))+"
)


def _integer_multiple(divisor: int) -> str | None:
    if divisor % 3 == 0 and divisor % 9:
        rest = _integer_multiple(divisor // 3)
        return None if rest is None else f"({rest} & {_lark(f'-?{_BY_3}')})"
    if divisor == 1:
        return _lark(ANY_INTEGER)
    width = next((k for k in range(1, 20) if 10**k % divisor == 0), None)
    if width is None or 10**width // divisor > 1000:
        return None
    if 10**width == divisor:
        return _lark(rf"(?:0|-?[1-9][0-9]*0{{{width}}})")
    endings = range(0, 10**width, divisor)
    short = "|".join(str(n) for n in endings if n)
    long = "|".join(f"{n:0{width}d}" for n in endings)
    return _lark(rf"(?:0|-?(?:{short})|-?[1-9][0-9]*(?:{long}))")


def other_than_multiples(divisor: int | Decimal) -> str | None:
    """A Lark expression that no plain spelling of a multiple matches; None for a divisor without an expression."""
    own = multiple_expression(Decimal(divisor), integers_only=False)
    return None if own is None else f"(~({own} {_lark(r'(?:[.]0+)?')}) & {_lark('[^eE]*')})"


def has_multiple(case: Case, divisor: Decimal) -> bool:
    """Whether a multiple lies within the case's bounds."""
    if case.low is None or case.high is None:
        return True
    first = (Decimal(case.low.value) / divisor).to_integral_value(rounding="ROUND_CEILING")
    if first * divisor == case.low.value and case.low.open:
        first += 1
    last = first * divisor
    return last < case.high.value or (last == case.high.value and not case.high.open)


def _lark(text: str) -> str:
    return "/" + text.replace("/", r"\/") + "/"
