"""Whether an expression has any text at all. Without & and ~ it has; else its rests are searched for one that can end.

Bytes that an expression does not tell apart lead to the same rest, so one of each class is tried (Owens, Reppy and
Turon 2009, "Regular-expression derivatives re-examined").
"""

from __future__ import annotations

from collections import deque

from sglite.grammar.automaton.regex import ALL_BYTES, NotTold, Regex, Regexes

_MOST_LOOKS = 300  # rests whose own rests are made: some milliseconds


def is_alive(regexes: Regexes, regex: Regex) -> bool:
    """Raises TooManyStates, NotTold. Remembers."""
    if regex.alive is not None:
        return regex.alive
    if regex.number in regexes.not_told:
        raise NotTold
    return _search(regexes, regex)


def _search(regexes: Regexes, start: Regex) -> bool:
    """From both ends of the queue in turn: the nearest end of a text may be near, or a long way straight on."""
    came_from: dict[Regex, Regex | None] = {start: None}
    queue = deque([start])
    looks = 0
    while queue:
        if looks == _MOST_LOOKS:
            regexes.not_told.add(start.number)
            raise NotTold
        looks += 1
        here = queue.pop() if looks % 2 else queue.popleft()
        for members in sorted((c & here.first for c in _classes(here)), key=int.bit_count):  # the widest comes last
            if not members:
                continue
            rest = regexes.rest(here, (members & -members).bit_length() - 1)
            if rest.alive:
                at: Regex | None = here
                while at is not None:
                    at.alive = True
                    at = came_from[at]
                return True
            if rest.alive is None and rest not in came_from:
                came_from[rest] = here
                queue.append(rest)
    for dead in came_from:
        dead.alive = False
    return False


def _classes(regex: Regex) -> tuple[int, ...]:
    """Disjoint bit sets that hold all bytes; those of one set have the same rest."""
    if regex.classes is None:
        regex.classes = _find_classes(regex)
    return regex.classes


def _find_classes(regex: Regex) -> tuple[int, ...]:
    parts = regex.parts
    match regex.kind:
        case "set":
            return tuple(c for c in (parts[0], ALL_BYTES & ~parts[0]) if c)
        case "cat":
            head, tail = parts
            return _finer(_classes(head), _classes(tail)) if head.nullable else _classes(head)
        case "or" | "and":
            found: tuple[int, ...] = (ALL_BYTES,)
            for part in parts:
                found = _finer(found, _classes(part))
            return found
        case "not" | "repeat":
            return _classes(parts[0])
        case _:
            return (ALL_BYTES,)


def _finer(some: tuple[int, ...], others: tuple[int, ...]) -> tuple[int, ...]:
    if len(some) == 1:
        return others
    if len(others) == 1:
        return some
    return tuple(dict.fromkeys(a & b for a in some for b in others if a & b))
