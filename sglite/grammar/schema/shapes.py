"""Which arrays of a value hold no item twice, and which numbers are checked, by place: what the residual rules follow.

The emitter notes for each conjunction what its grammar mentions where (`Parts`). A place of a value may be in several
conjunctions at once, one for each case that it may turn out to be; they become one shape, if they agree.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from sglite.grammar.residual.numbers import NumberRule
from sglite.grammar.residual.rules import NOTHING, Shape
from sglite.grammar.schema.cases import Case, Gap
from sglite.grammar.schema.numerals import followed_numbers
from sglite.grammar.schema.values import string_text

Key = tuple[tuple[int, ...], bool]  # a conjunction, and whether its numbers have one spelling
MAX_SHAPES = 5_000


class Unique(msgspec.Struct, frozen=True):
    """How an array of some case is kept free of items that stand twice."""

    gap: Gap  # what to tell where it cannot be followed
    runs_out: bool


class Parts(msgspec.Struct):
    """What the grammar of one conjunction mentions. Sets, lists and dicts are its own."""

    same: set[Key] = set()  # in its own place
    items: dict[int, set[Key]] = {}
    rest: set[Key] = set()
    named: dict[str, set[Key]] = {}
    other: set[Key] = set()
    unique: list[Unique] = []  # of its arrays, where that is to be followed
    free: bool = False  # some of its arrays may hold an item twice
    repeated: Gap | None = None  # some of its arrays hold an item twice: what to tell where that cannot be followed
    other_arrays: bool = False  # some need not
    plain_items: bool = False  # numbers in its items have one spelling
    number_cases: list[Case] = []  # those in which its own place may hold a number
    followed_numbers: Gap | None = None  # where these are checked as they are written: what to tell if they cannot be


class Conflict(Exception):
    """A rule that holds or does not, depending on what else the value is."""

    def __init__(self, gap: Gap) -> None:
        super().__init__(gap.pointer)
        self.gap = gap


def _gaps(part: Parts) -> list[Gap]:
    """What to tell where something of it cannot be followed."""
    single = [gap for gap in (part.repeated, part.followed_numbers) if gap is not None]
    return [*(one.gap for one in part.unique), *single]


def _is_followed(part: Parts) -> bool:
    return bool(part.unique) or part.repeated is not None or part.followed_numbers is not None


def shapes_of(parts: dict[Key, Parts], start: Key) -> tuple[Shape, ...]:
    """Of all values under `start`; () where nothing is to be followed. Raises Conflict."""
    if not any(map(_is_followed, parts.values())):
        return ()
    return _Shapes(parts).build(start)


class _Shapes:
    def __init__(self, parts: dict[Key, Parts]) -> None:
        self.parts = parts
        self.matters = _reaching(parts)
        self.numbers: dict[frozenset[Key], int] = {}
        self.queue: deque[frozenset[Key]] = deque()

    def build(self, start: Key) -> tuple[Shape, ...]:
        self.number({start})
        shapes: list[Shape] = []
        while self.queue:
            shapes.append(self.shape(self.queue.popleft()))
            if len(self.numbers) > MAX_SHAPES:
                raise Conflict(next(gap for part in self.parts.values() for gap in _gaps(part)))
        return tuple(shapes)

    def number(self, keys: Iterable[Key]) -> int:
        closed: set[Key] = set()
        stack = list(keys)
        while stack:
            key = stack.pop()
            if key not in closed:
                closed.add(key)
                stack.extend(self.parts[key].same)
        if self.matters.isdisjoint(closed):
            return NOTHING
        place = frozenset(closed)
        if place not in self.numbers:
            self.numbers[place] = len(self.numbers)
            self.queue.append(place)
        return self.numbers[place]

    def shape(self, place: frozenset[Key]) -> Shape:
        parts = [self.parts[key] for key in place]
        unique = [one for part in parts for one in part.unique]
        if unique and any(part.free for part in parts):
            raise Conflict(unique[0].gap)
        repeated = [part.repeated for part in parts if part.repeated is not None]
        if repeated and any(part.other_arrays for part in parts):
            raise Conflict(repeated[0])
        width = max((max(part.items, default=-1) + 1 for part in parts), default=0)
        items = tuple(
            self.number(key for part in parts for key in part.items.get(index, part.rest)) for index in range(width)
        )
        names = dict.fromkeys(name for part in parts for name in part.named)
        named = {
            string_text(name)[1:-1]: self.number(key for part in parts for key in part.named.get(name, part.other))
            for name in names
        }
        return Shape(
            unique=bool(unique),
            runs_out=any(one.runs_out for one in unique),
            repeated=bool(repeated),
            items=items,
            rest=self.number(key for part in parts for key in part.rest),
            named=named,
            other=self.number(key for part in parts for key in part.other),
            numbers=self.number_rules(place),
        )

    def number_rules(self, place: frozenset[Key]) -> tuple[NumberRule, ...]:
        """What a number at the place satisfies one of. Conjunctions that hang on what else there is must not differ in
        that: a number could be right for the wrong one."""
        gap = next((gap for key in place if (gap := self.parts[key].followed_numbers) is not None), None)
        if gap is None:
            return ()
        roots = place - set().union(*(self.parts[key].same for key in place))
        found = {followed_numbers(cases) for root in sorted(roots) if (cases := self.number_cases(root))}
        rules = found.pop() if len(found) == 1 else None
        if rules is None:
            raise Conflict(gap)
        return rules

    def number_cases(self, root: Key) -> list[Case]:
        """Those of a conjunction and of what stands in its place."""
        seen: set[Key] = set()
        stack, cases = [root], []
        while stack:
            key = stack.pop()
            if key not in seen:
                seen.add(key)
                cases += self.parts[key].number_cases
                stack += sorted(self.parts[key].same)
        return cases


def _reaching(parts: dict[Key, Parts]) -> set[Key]:
    """The conjunctions with an array to be followed in them or somewhere below."""
    above: dict[Key, set[Key]] = {}
    for key, part in parts.items():
        groups = [part.same, part.rest, part.other, *part.items.values(), *part.named.values()]
        for child in set().union(*groups):
            above.setdefault(child, set()).add(key)
    found = {key for key, part in parts.items() if _is_followed(part)}
    stack = list(found)
    while stack:
        for key in above.get(stack.pop(), ()):
            if key not in found:
                found.add(key)
                stack.append(key)
    return found
