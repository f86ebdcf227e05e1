"""Arrays of a case: `[` items `]`.

Without contains and uniqueItems, the first items stand one by one and the rest repeats. With contains, the
rule's state counts matching items; with uniqueItems over few known values, a bit per value remembers it, over others
the items are kept apart while they are written (distinct.py).
"""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

from sglite.grammar.schema.cases import ARRAY, Case, Conjunction, Contains, Gap
from sglite.grammar.schema.distinct import finite_values, prefix_length
from sglite.grammar.schema.grammar import Repeat, Rule, Symbol, Terminal
from sglite.grammar.schema.order import satisfies
from sglite.grammar.schema.pattern import PatternError
from sglite.grammar.schema.shapes import Unique
from sglite.grammar.schema.values import Json

if TYPE_CHECKING:
    from sglite.grammar.schema.emit import Emitter

OPEN, CLOSE = Terminal('"["'), Terminal('"]"')
MAX_COUNT_STATES = 4000
MAX_COMPARED = 8  # places of a tuple that are compared with each other


def emit_array(emitter: Emitter, rule: Rule, case: Case) -> None:
    if case.repeated is not None:
        _repeat(emitter, case)
    else:
        emitter.here.other_arrays = True
    if case.unique is not None and _places_differ(emitter, case):
        case = case.copy()
        case.unique = None
    if case.unique is None:
        emitter.here.free |= case.max_items is None or case.max_items > 1
    elif case.max_items is None or case.max_items > 1:
        values = _finite_items(emitter, case)
        if values is not None and (not case.contains or _is_simple(case)):
            _distinct(emitter, rule, case, values)
            return
        gap, runs_out = _followed(emitter, case)
        if gap is None:
            emitter.here.unique.append(Unique(Gap(ARRAY, *case.unique, "uniqueItems", _AMBIGUOUS), runs_out))
            emitter.here.plain_items |= runs_out
        else:
            emitter.here.free = True
            emitter.on_gap(Gap(ARRAY, *case.unique, "uniqueItems", gap))
    if case.contains:
        if _count_states(case) <= MAX_COUNT_STATES:
            _counted(emitter, rule, case)
            return
        if _is_simple(case) and case.max_items is None and case.min_items <= case.contains[0].least:
            _counted_by_parameter(emitter, rule, case)
            return
        emitter.leave_out(case, "contains", "counting the matching items needs too many states")
    _plain(emitter, rule, case)


_AMBIGUOUS = "whether items may stand twice depends on what else the value is"


def _places_differ(emitter: Emitter, case: Case) -> bool:
    """Proven: the items are few, and what may stand at one place may not at any other."""
    length, hopeless = prefix_length(case), emitter.expander.is_hopeless
    rest = case.item_literals(length)
    if case.max_items is not None and case.max_items < length:
        length = case.max_items
    elif not (case.max_items == length or (rest and hopeless(rest))):
        return False
    places = [case.item_literals(index) for index in range(length)]
    pairs = combinations(places, 2) if length <= MAX_COMPARED else ()
    return 1 < length <= MAX_COMPARED and all(hopeless(tuple(dict.fromkeys(one + other))) for one, other in pairs)


def _repeat(emitter: Emitter, case: Case) -> None:
    """Some item must stand twice: no array ends before. It always can, by a copy of an earlier item."""
    assert case.repeated is not None
    gap = Gap(ARRAY, *case.repeated, "uniqueItems", _AMBIGUOUS)
    if case.max_items is not None or case.contains or prefix_length(case):
        emitter.on_gap(Gap(ARRAY, *case.repeated, "uniqueItems", "an item may not find room to stand twice"))
        emitter.here.other_arrays = True
    elif gap.pointer in emitter.not_followed:
        emitter.on_gap(gap)
        emitter.here.other_arrays = True
    else:
        emitter.here.repeated = emitter.here.repeated or gap


def _followed(emitter: Emitter, case: Case) -> tuple[str | None, bool]:
    """Why items cannot be kept apart while they are written, if so, and whether they can run out."""
    assert case.unique is not None
    if case.unique[1] in emitter.not_followed:
        return _AMBIGUOUS, False
    if case.contains and not (_is_simple(case) and case.contains[0].least < 2 and case.contains[0].most is None):
        return "beside such a contains it is not followed", False
    length = prefix_length(case)
    last = length if case.max_items is None else min(length, case.max_items - 1)
    places = [case.item_literals(index) for index in range(last + 1)]
    distinct = emitter.distinct
    if all(distinct.is_open(literals) for literals in places):
        return None, False  # as long as contains asks for an item, none like it was there
    if case.contains:
        return "beside contains, items that can run out are not followed", False
    if length or not distinct.can_be_followed(places[0]):
        return "it is not proven that an item once begun can still become a new one", False
    if distinct.count(places[0]) < case.min_items:
        return f"it is not proven that {case.min_items} different items exist", False
    return None, True


def _plain(emitter: Emitter, rule: Rule, case: Case) -> None:
    prefix = prefix_length(case)
    if prefix == 0:
        _repeated(emitter, rule, case)
        return
    state = emitter.grammar.new_rule()
    emitter.grammar.add(rule, OPEN, state)
    for index in range(prefix):
        if index >= case.min_items:
            emitter.grammar.add(state, CLOSE)
        if case.max_items is not None and index >= case.max_items:
            return
        after = emitter.grammar.new_rule()
        emitter.grammar.add(state, *_separator(emitter, index), emitter.item(index, case.item_literals(index)), after)
        state = after
    rest = emitter.item(None, case.item_literals(prefix))
    most = None if case.max_items is None else case.max_items - prefix
    least = max(case.min_items - prefix, 0)
    emitter.grammar.add(state, Repeat((emitter.item_separator, rest), least, most), CLOSE)


def _repeated(emitter: Emitter, rule: Rule, case: Case) -> None:
    item = emitter.item(None, case.item_literals(0))
    if case.min_items == 0:
        emitter.grammar.add(rule, OPEN, CLOSE)
    if case.max_items == 0:
        return
    most = None if case.max_items is None else case.max_items - 1
    more = Repeat((emitter.item_separator, item), max(case.min_items - 1, 0), most)
    emitter.grammar.add(rule, OPEN, item, more, CLOSE)


def _separator(emitter: Emitter, index: int) -> tuple[Symbol, ...]:
    return (emitter.item_separator,) if index else ()


# --- contains


def _count_states(case: Case) -> int:
    positions = _last_position(case) + 1
    for rule in case.contains:
        positions *= _cap(rule) + 1
    return positions


def _last_position(case: Case) -> int:
    """The index from which on positions are all the same; at least 1, so that 0 is the first item alone."""
    return max(1, prefix_length(case), case.min_items, case.max_items or 0, *(c.start for c in case.contains))


def _cap(rule: Contains) -> int:
    """Counts above are all the same."""
    return rule.least if rule.most is None else rule.most


def _counted(emitter: Emitter, rule: Rule, case: Case) -> None:
    """States are (index, how many matches of each contains), both up to where they stop to matter."""
    last = _last_position(case)
    states: dict[tuple[int, tuple[int, ...]], Rule] = {}
    queue: list[tuple[int, tuple[int, ...]]] = []

    def state(index: int, counts: tuple[int, ...]) -> Rule:
        place = (min(index, last), counts)
        if place not in states:
            states[place] = emitter.grammar.new_rule()
            queue.append(place)
        return states[place]

    begin = tuple(0 for _ in case.contains)
    emitter.grammar.add(rule, OPEN, state(0, begin))
    while queue:
        index, counts = queue.pop()
        here = states[index, counts]
        enough = all(count >= rule.least for count, rule in zip(counts, case.contains, strict=True))
        if index >= case.min_items and enough:
            emitter.grammar.add(here, CLOSE)
        if case.max_items is not None and index >= case.max_items:
            continue
        for literals, after in _counted_items(case, index, counts):
            emitter.grammar.add(
                here, *_separator(emitter, index), emitter.item(None, literals), state(index + 1, after)
            )


def _counted_items(case: Case, index: int, counts: tuple[int, ...]) -> list[tuple[Conjunction, tuple[int, ...]]]:
    """The ways in which the next item can (not) count, as (its literals, the counts after it)."""
    ways: list[tuple[Conjunction, tuple[int, ...]]] = [(case.item_literals(index), ())]
    for count, rule in zip(counts, case.contains, strict=True):
        grown = []
        for literals, after in ways:
            if index < rule.start:
                grown.append((literals, (*after, count)))
                continue
            if count < _cap(rule):
                grown.append(((*literals, rule.item), (*after, count + 1)))
            elif rule.most is None:
                grown.append((literals, (*after, count)))
                continue
            other = literals if rule.most is None else (*literals, ~rule.item)
            grown.append((other, (*after, count)))
        ways = grown
    return [(tuple(dict.fromkeys(literals)), after) for literals, after in ways]


def _is_simple(case: Case) -> bool:
    """One contains, about all of the items, which have one rule."""
    return len(case.contains) == 1 and case.contains[0].start == 0 and not prefix_length(case)


def _counted_by_parameter(emitter: Emitter, rule: Rule, case: Case) -> None:
    """The matching items are counted in the parameter of the rules: for counts that are too large to spell out."""
    counted, grammar = case.contains[0], emitter.grammar
    literals = case.item_literals(0)
    bits = f"[0:{_cap(counted).bit_length() + 1}]"
    enough = f"ge({bits},{counted.least})" if counted.least else ""
    room = "" if counted.most is None else f"lt({bits},{counted.most})"
    matching = emitter.item(None, tuple(dict.fromkeys((*literals, counted.item))))
    # Without an upper bound, an item that matches and is not counted does no harm.
    other = literals if counted.most is None else tuple(dict.fromkeys((*literals, ~counted.item)))
    going = grammar.new_rule(parametric=True)
    begin = grammar.new_rule(parametric=True)
    grammar.add(rule, OPEN, Rule(begin.number, "0x0"))
    for state, separator in ((begin, ()), (going, (emitter.item_separator,))):
        grammar.add(state, CLOSE, condition=enough)
        grammar.add(state, *separator, matching, Rule(going.number, f"incr({bits})"), condition=room)
        grammar.add(state, *separator, emitter.item(None, other), Rule(going.number, "_"))


# --- uniqueItems


def _finite_items(emitter: Emitter, case: Case) -> list[Json] | None:
    """All values that any item can have, None where they are too many to remember."""
    return None if prefix_length(case) else finite_values(emitter, case.item_literals(0))


def _distinct(emitter: Emitter, rule: Rule, case: Case, values: list[Json]) -> None:
    """Each value at most once: bit i of the parameter says that value i was there."""
    if case.contains:
        try:
            _distinct_counted(emitter, rule, case, values)
            return
        except PatternError as error:
            emitter.leave_out(case, "contains", str(error))
    if case.min_items > len(values):
        return
    grammar = emitter.grammar
    if case.min_items == 0:
        grammar.add(rule, OPEN, CLOSE)
    most = len(values) if case.max_items is None else min(case.max_items, len(values))
    if most == 0:
        return
    if most == 1:
        one = grammar.new_rule()
        for value in values:
            emitter.constant(one, value)
        grammar.add(rule, OPEN, one, CLOSE)
        return
    item, more = grammar.new_rule(parametric=True), grammar.new_rule(parametric=True)
    grammar.add(rule, OPEN, Rule(item.number, "0x0"))
    for i, value in enumerate(values):
        spelled = grammar.new_rule()
        emitter.constant(spelled, value)
        grammar.add(item, spelled, Rule(more.number, f"set_bit({i})"), condition=f"bit_clear({i})")
    grammar.add(more, CLOSE, condition=f"bit_count_ge(_,{case.min_items})" if case.min_items > 1 else "")
    grammar.add(more, emitter.item_separator, Rule(item.number, "_"), condition=f"bit_count_lt(_,{most})")


def _distinct_counted(emitter: Emitter, rule: Rule, case: Case, values: list[Json]) -> None:
    """The same where a number of the items must be some of the values: these have the first bits. So many places are
    kept for them that no array gets stuck."""
    counted, grammar = case.contains[0], emitter.grammar
    found = [(value, satisfies(emitter.expander.evaluator, counted.item, value)) for value in values]
    wanted, others = [value for value, fits in found if fits], [value for value, fits in found if not fits]
    most = len(values) if case.max_items is None else min(case.max_items, len(values))
    room = min(len(wanted), len(wanted) if counted.most is None else counted.most, most)
    others_room = min(len(others), most - counted.least)
    if counted.least > room or case.min_items > min(most, room + others_room):
        return
    if case.min_items == 0 and counted.least == 0:
        grammar.add(rule, OPEN, CLOSE)
    first, rest = f"[0:{len(wanted)}]", f"[{len(wanted)}:{len(values)}]"
    item, more = grammar.new_rule(parametric=True), grammar.new_rule(parametric=True)
    grammar.add(rule, OPEN, Rule(item.number, "0x0"))
    rooms: list[str] = []
    for part, bits, limit, offset in ((wanted, first, room, 0), (others, rest, others_room, len(wanted))):
        if limit > 0:
            rooms.append(f"bit_count_lt({bits},{limit})")
        for i, value in enumerate(part if limit > 0 else (), offset):
            spelled = grammar.new_rule()
            emitter.constant(spelled, value)
            free = f"and(bit_clear({i}),{rooms[-1]})"
            grammar.add(item, spelled, Rule(more.number, f"set_bit({i})"), condition=free)
    enough = f"bit_count_ge(_,{max(case.min_items, 1)})"
    if counted.least:
        enough = f"and({enough},bit_count_ge({first},{counted.least}))"
    grammar.add(more, CLOSE, condition=enough)
    space = rooms[0] if len(rooms) == 1 else f"or({rooms[0]},{rooms[1]})"
    further = f"and(bit_count_lt(_,{most}),{space})"
    grammar.add(more, emitter.item_separator, Rule(item.number, "_"), condition=further)
