"""Rules that no grammar holds: keys never twice, items never twice, numbers with divisors that are too large.

They are found by the schema front end, travel between processes as plain values, and are kept by `WithResidual`.
"""

from __future__ import annotations

import msgspec

from sglite.grammar.residual.numbers import NumberRule

NOTHING = -1  # the shape of values below which no array is ruled


class Shape(msgspec.Struct, frozen=True):
    """What may stand at one place of a value, as far as rules go. Numbers are indexes into `ResidualRules.shapes`."""

    unique: bool = False  # an array here holds no item twice
    runs_out: bool = False  # ... and some beginning of an item has only finitely many ways to go on
    items: tuple[int, ...] = ()  # of the first items
    rest: int = NOTHING  # of the further ones
    named: dict[str, int] = {}  # by a key's spelling between its quotes
    other: int = NOTHING  # of any other key
    numbers: tuple[NumberRule, ...] = ()  # a number here satisfies one of them; (): any number will do


class ResidualRules(msgspec.Struct, frozen=True, kw_only=True):
    """No key twice in any object, and what the shapes say of arrays (shapes[0]: the whole value; none: nothing).

    Keys run out where some beginning of an undeclared key has only finitely many ways to go on: such a key matches one
    of `keys_run_out`, searched for as a pattern of the schema is.
    """

    keys_run_out: tuple[str, ...] = ()
    keys_are_counted: bool = False  # some object needs two or more undeclared keys
    shapes: tuple[Shape, ...] = ()

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
    def decides(self) -> str:
        """A keyword of the schema that holds through these rules alone; "" where they only keep keys apart."""
        if any(shape.unique for shape in self.shapes):
            return "uniqueItems"
        return "multipleOf" if self.shapes else "minProperties" if self.keys_are_counted else ""
