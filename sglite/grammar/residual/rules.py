"""Rules that no grammar holds: keys never twice, items never twice, numbers with divisors that are too large.

They are found by the schema front end, travel between processes as plain values, and are kept by `WithResidual`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from sglite.grammar.residual.around import Around
from sglite.grammar.residual.numbers import NumberRule

NOTHING = -1  # the shape of values below which no array is ruled


class Shape(msgspec.Struct, frozen=True):
    """What may stand at one place of a value, as far as rules go. Numbers are indexes into `ResidualRules.shapes`."""

    unique: bool = False  # an array here holds no item twice
    repeated: bool = False  # an array here holds some item twice
    runs_out: bool = False  # ... and some beginning of an item has only finitely many ways to go on
    items: tuple[int, ...] = ()  # of the first items
    rest: int = NOTHING  # of the further ones
    named: dict[str, int] = {}  # by a key's spelling between its quotes
    other: int = NOTHING  # of any other key
    numbers: tuple[NumberRule, ...] = ()  # a number here satisfies one of them; (): any number will do


class ResidualRules(msgspec.Struct, frozen=True, kw_only=True):
    """No key twice in any object, and what the shapes say of arrays (shapes[0]: the whole value; none: nothing). With
    `around`, of the values within other text.

    Keys run out where some beginning of an undeclared key has only finitely many ways to go on: such a key matches one
    of `keys_run_out`, searched for as a pattern of the schema is.
    """

    keys_run_out: tuple[str, ...] = ()
    keys_are_counted: bool = False  # some object needs two or more undeclared keys
    shapes: tuple[Shape, ...] = ()
    around: Around | None = None

    @property
    def runs_out(self) -> bool:
        return bool(self.keys_run_out) or any(shape.runs_out for shape in self.shapes)

    @property
    def number_bytes(self) -> int:
        """What the numbers of one object may take beyond what the grammar tells; 0 where it tells all."""
        longest = max((rule.longest for shape in self.shapes for rule in shape.numbers), default=0)
        places = {i for i, shape in enumerate(self.shapes) if shape.numbers}
        most = max((sum(n in places for n in shape.named.values()) for shape in self.shapes), default=0)
        return longest * max(1, most)

    @property
    def needs_end(self) -> bool:
        """The value itself may be a number that has a rule: something has to tell where it ends."""
        return bool(self.shapes and self.shapes[0].numbers)

    @property
    def decides(self) -> str:
        """A keyword of the schema that holds through these rules alone; "" where they only keep keys apart."""
        if any(shape.unique or shape.repeated for shape in self.shapes):
            return "uniqueItems"
        return "multipleOf" if self.shapes else "minProperties" if self.keys_are_counted else ""


def united(parts: Sequence[ResidualRules | None]) -> tuple[ResidualRules, list[int]]:
    """The rules of several values as one, and the shape of each of the values in it."""
    shapes: list[Shape] = []
    starts: list[int] = []
    patterns: dict[str, None] = {}
    for rules in parts:
        starts.append(len(shapes) if rules is not None and rules.shapes else NOTHING)
        if rules is not None:
            patterns.update(dict.fromkeys(rules.keys_run_out))
            by = len(shapes)
            shapes += [_moved(shape, by) for shape in rules.shapes]
    counted = any(rules is not None and rules.keys_are_counted for rules in parts)
    return ResidualRules(keys_run_out=tuple(patterns), keys_are_counted=counted, shapes=tuple(shapes)), starts


def _moved(shape: Shape, by: int) -> Shape:
    def moved(number: int) -> int:
        return number if number == NOTHING else number + by

    return msgspec.structs.replace(
        shape,
        items=tuple(map(moved, shape.items)),
        rest=moved(shape.rest),
        named={name: moved(number) for name, number in shape.named.items()},
        other=moved(shape.other),
    )
