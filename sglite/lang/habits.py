"""What a program did behind each of its calls in the runs before, for what it will do in the next.

A program that reads an answer (`if s["points"]: ...`) has not said what it will do while the answer is on its way. But
most do the same each time, and so it is known from the runs before: the same texts and the next call, or a fork whose
states begin in the same way. Such calls are sent early too (early.py), and given up where the program does something
else. What differs from run to run, as texts with the arguments in them do, is never guessed.

    run 1, 2     gen points -> fork(6), each "\\nPoint 1 in full:" gen text
    run 3        gen points ............ its six forks wait in the engine for its end
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglite.lang.items import Fork, Snapshot
from sglite.lang.nodes import Gen, Node, RoleBegin, RoleEnd, ScopeBegin, ScopeEnd, Select, Text
from sglite.lang.outlook import Place

_MOST_PLACES = 1024  # of a program
_MOST_CHARS = 4096  # of the texts behind one call: longer ones are hardly the same each time
_MOST_NEEDED = 64
_KNOWN = (Text, RoleBegin, RoleEnd, ScopeBegin, ScopeEnd)


@dataclass(frozen=True, slots=True)
class Forked(Node):
    """A fork into states of these numbers. A call that follows is not looked at."""

    children: tuple[int, ...]


@dataclass(slots=True)
class _Habit:
    """`again`: how many times in a row it has been the same. `needed`: how many make it likely, more after each time
    that it was not."""

    nodes: tuple[Node, ...]
    again: int = 0
    needed: int = 1


class Habits:
    """Of one program. All methods are called on the program loop. A place whose second number is 0 is the begin of a
    state."""

    def __init__(self) -> None:
        self._seen: dict[Place, _Habit] = {}

    def saw(self, place: Place, nodes: Sequence[Node]) -> None:
        """These followed the call there: text, and in the end a call or a fork."""
        found = self._seen.get(place)
        if found is not None and found.nodes == tuple(nodes):
            found.again += 1
        elif sum(len(node.value) for node in nodes if isinstance(node, Text)) > _MOST_CHARS:
            self._seen.pop(place, None)
        elif found is not None:
            found.nodes, found.again, found.needed = tuple(nodes), 0, min(_MOST_NEEDED, 2 * found.needed)
        elif len(self._seen) < _MOST_PLACES:
            self._seen[place] = _Habit(tuple(nodes))

    def likely(self, place: Place, begun: Sequence[Node] = ()) -> tuple[Node, ...]:
        """What will follow the call there behind `begun`, which has followed it already; () where that is uncertain."""
        found = self._seen.get(place)
        if found is None or found.again < found.needed or found.nodes[: len(begun)] != tuple(begun):
            return ()
        return found.nodes[len(begun) :]


class Follows:
    """What one state does behind its last call, as it is carried out."""

    def __init__(self) -> None:
        self._nodes: list[Node] | None = []  # None: it is written down already, or something that nobody guesses

    def carried_out(self, node: Node, place: Place, habits: Habits) -> None:
        """`place`: of the last call before it."""
        nodes = self._nodes
        if isinstance(node, Gen | Select):
            if nodes is not None:
                habits.saw(place, [*nodes, node])
            self._nodes = []
        elif isinstance(node, Fork):
            if nodes is not None:
                habits.saw(place, [*nodes, Forked(tuple(child.number for child in node.children))])
            self._nodes = None
        elif isinstance(node, _KNOWN):
            if nodes is not None:
                nodes.append(node)
        elif not isinstance(node, Snapshot):
            self._nodes = None
