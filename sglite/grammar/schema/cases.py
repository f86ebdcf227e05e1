"""One way in which a value can satisfy a conjunction of subschemas.

A literal is a node that must hold (its id) or must not (~id). A conjunction is a tuple of literals; it
normalises (expand.py) to a list of cases, whose union it is. A case says which types are left and, per type,
what narrows it; a rule for one type says nothing about the others, as in JSON schema.
"""

from __future__ import annotations

import math
from copy import copy
from decimal import Decimal

import msgspec

from sglite.grammar.schema.pattern_text import found_in
from sglite.grammar.schema.presence import Formula, conjunction
from sglite.grammar.schema.values import Json, identity, is_integral, is_number, json_type

Literal = int
Conjunction = tuple[Literal, ...]
Rank = tuple[int, ...]  # where in the schema's text: decides the order of keys

NULL, BOOLEAN, INTEGER, FRACTION, STRING, ARRAY, OBJECT = (1 << i for i in range(7))
NUMBER = INTEGER | FRACTION  # FRACTION: numbers that are not integral
ALL_TYPES = (1 << 7) - 1
TYPE_BITS = {
    "null": NULL,
    "boolean": BOOLEAN,
    "integer": INTEGER,
    "number": NUMBER,
    "string": STRING,
    "array": ARRAY,
    "object": OBJECT,
    "any": ALL_TYPES,
}


def type_bit(value: Json) -> int:
    if is_number(value):
        return INTEGER if is_integral(value) else FRACTION
    return TYPE_BITS[json_type(value)]


class Bound(msgspec.Struct, frozen=True):
    value: int | Decimal
    open: bool  # the bound itself is out


class TextRule(msgspec.Struct, frozen=True):
    """A string must (not) match: kind "pattern" (ECMA text, searched) or "format" (a name)."""

    kind: str
    text: str
    negated: bool


class KeyRule(msgspec.Struct, frozen=True):
    """properties, patternProperties and additionalProperties of one node.

    A key takes the literals of all that name or match it; `rest` where there are none.
    """

    rank: Rank
    named: dict[str, Literal]
    patterns: tuple[tuple[str, Literal], ...]
    rest: Literal | None


class SomeKey(msgspec.Struct, frozen=True):
    """At least one key (matching `pattern`, outside of `named` and `not_matching`) whose name and value hold."""

    pattern: str | None = None
    named: frozenset[str] = frozenset()
    not_matching: tuple[str, ...] = ()
    name: Literal | None = None
    value: Literal | None = None


class ItemRule(msgspec.Struct, frozen=True):
    prefix: tuple[Literal | None, ...]
    rest: Literal | None


class Contains(msgspec.Struct, frozen=True):
    """Between `least` and `most` items from index `start` on satisfy `item`."""

    item: Literal
    least: int
    most: int | None
    start: int = 0


class Unlooked(msgspec.Struct, frozen=True):
    """Keys or items that no other keyword looks at satisfy `child` (unevaluated.py)."""

    node_id: int
    pointer: str
    keyword: str
    child: Literal
    rank: Rank


class Gap(msgspec.Struct, frozen=True):
    """A rule that no grammar here holds; it concerns the types of `mask` only."""

    mask: int
    node_id: int
    pointer: str
    keyword: str
    reason: str


class Case(msgspec.Struct):
    """Mutable while expand.py builds it (`copy` at a fork), constant afterwards."""

    types: int = ALL_TYPES
    values: tuple[Json, ...] | None = None  # nothing but these
    not_values: tuple[Json, ...] = ()
    low: Bound | None = None
    high: Bound | None = None
    multiples: tuple[int | Decimal, ...] = ()
    not_multiples: tuple[int | Decimal, ...] = ()
    texts: tuple[TextRule, ...] = ()
    min_length: int = 0
    max_length: int | None = None
    items: tuple[ItemRule, ...] = ()
    contains: tuple[Contains, ...] = ()
    min_items: int = 0
    max_items: int | None = None
    unique: tuple[int, str] | None = None  # node and pointer of the first uniqueItems
    repeated: tuple[int, str] | None = None  # of a uniqueItems that must not hold
    keys: tuple[KeyRule, ...] = ()
    some_keys: tuple[SomeKey, ...] = ()
    key_names: tuple[Literal, ...] = ()
    listed: tuple[str, ...] | None = None  # undeclared names that are told apart as declared ones are (objects.py)
    required: dict[str, None] = {}  # an ordered set, its own
    absent: frozenset[str] = frozenset()
    presence: Formula = True
    min_keys: int = 0
    max_keys: int | None = None
    unlooked: tuple[Unlooked, ...] = ()
    gaps: tuple[Gap, ...] = ()
    done: frozenset[Literal] = frozenset()  # literals whose keywords are in here

    def copy(self) -> Case:
        twin = copy(self)
        twin.required = dict(self.required)
        return twin

    def narrow(self, mask: int) -> None:
        self.types &= mask
        if self.values is not None:
            self.limit_to(self.values)

    def limit_to(self, values: tuple[Json, ...]) -> None:
        """Nothing but `values`, and of them only what was possible before."""
        if self.values is not None and values is not self.values:
            wanted = {identity(value) for value in values}
            values = tuple(value for value in self.values if identity(value) in wanted)
        self.values = tuple(value for value in values if type_bit(value) & self.types)
        possible = 0
        for value in self.values:
            possible |= type_bit(value)
        self.types &= possible

    def raise_low(self, bound: Bound) -> None:
        if self.low is None or (self.low.value, self.low.open) < (bound.value, bound.open):
            self.low = bound
            self._drop_empty_range()

    def lower_high(self, bound: Bound) -> None:
        if self.high is None or (self.high.value, not self.high.open) > (bound.value, not bound.open):
            self.high = bound
            self._drop_empty_range()

    def _drop_empty_range(self) -> None:
        if self.low is None or self.high is None or not self.types & NUMBER:
            return
        if (self.low.value, self.low.open or self.high.open) > (self.high.value, False):
            self.narrow(~NUMBER)
        elif self.low.value == self.high.value:
            self.narrow(~FRACTION if is_integral(self.low.value) else ~INTEGER)
        low, high = self.integer_range()
        if low is not None and high is not None and low > high:
            self.narrow(~INTEGER)

    def integer_range(self) -> tuple[int | None, int | None]:
        """The least and greatest integer within the bounds, None without a bound."""
        low = high = None
        if self.low is not None:
            low = math.ceil(self.low.value)
            low += self.low.open and low == self.low.value
        if self.high is not None:
            high = math.floor(self.high.value)
            high -= self.high.open and high == self.high.value
        return low, high

    def limit_length(self, least: int, most: int | None) -> None:
        self.min_length, self.max_length = max(self.min_length, least), _lower(self.max_length, most)
        if self.max_length is not None and self.min_length > self.max_length:
            self.narrow(~STRING)

    def limit_items(self, least: int, most: int | None) -> None:
        self.min_items, self.max_items = max(self.min_items, least), _lower(self.max_items, most)
        if self.max_items is not None and self.min_items > self.max_items:
            self.narrow(~ARRAY)

    def limit_keys(self, least: int, most: int | None) -> None:
        self.min_keys, self.max_keys = max(self.min_keys, least), _lower(self.max_keys, most)
        if self.max_keys is not None and max(self.min_keys, len(self.required)) > self.max_keys:
            self.narrow(~OBJECT)

    def require(self, name: str) -> None:
        self.required[name] = None
        if name in self.absent or (self.max_keys is not None and len(self.required) > self.max_keys):
            self.narrow(~OBJECT)

    def forbid(self, name: str) -> None:
        self.absent |= {name}
        if name in self.required:
            self.narrow(~OBJECT)

    def add_presence(self, formula: Formula) -> None:
        self.presence = conjunction([self.presence, formula])
        if self.presence is False:
            self.narrow(~OBJECT)

    def be_unique(self, node_id: int, pointer: str) -> None:
        self.unique = self.unique or (node_id, pointer)
        if self.repeated is not None:
            self.narrow(~ARRAY)

    def add_gap(self, gap: Gap) -> None:
        if gap not in self.gaps:
            self.gaps += (gap,)

    def item_literals(self, index: int) -> Conjunction:
        """What the item at `index` must satisfy (contains aside)."""
        found: dict[Literal, None] = {}
        for rule in self.items:
            literal = rule.prefix[index] if index < len(rule.prefix) else rule.rest
            if literal is not None:
                found[literal] = None
        return tuple(found)

    def key_literals(self, name: str) -> Conjunction:
        """What the value of the key `name` must satisfy, in schema order."""
        if len(self.keys) == 1 and not self.keys[0].patterns:
            literal = self.keys[0].named.get(name, self.keys[0].rest)
            return () if literal is None else (literal,)
        found: dict[Literal, None] = {}
        for rule in self.keys:
            hits = [rule.named[name]] if name in rule.named else []
            hits += [literal for pattern, literal in rule.patterns if found_in(pattern, name)]
            for literal in hits or ([] if rule.rest is None else [rule.rest]):
                found[literal] = None
        return tuple(found)


def _lower(one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)
