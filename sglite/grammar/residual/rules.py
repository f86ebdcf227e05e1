"""Rules about a whole object or array that no grammar holds: keys never twice, items never twice.

They are found by the schema front end, travel between processes as plain values, and are kept by `WithResidual`.
"""

from __future__ import annotations

import msgspec

NOTHING = -1  # the shape of values below which no array is ruled


class Shape(msgspec.Struct, frozen=True):
    """What may stand at one place of a value, as far as rules go. Numbers are indexes into `ResidualRules.shapes`."""

    unique: bool = False  # an array here holds no item twice
    runs_out: bool = False  # ... and some beginning of an item has only finitely many ways to go on
    items: tuple[int, ...] = ()  # of the first items
    rest: int = NOTHING  # of the further ones
    named: dict[str, int] = {}  # by a key's spelling between its quotes
    other: int = NOTHING  # of any other key


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
    def decides(self) -> str:
        """A keyword of the schema that holds through these rules alone; "" where they only keep keys apart."""
        return "uniqueItems" if self.shapes else "minProperties" if self.keys_are_counted else ""
