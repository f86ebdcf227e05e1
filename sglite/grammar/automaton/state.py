"""What is remembered at the places of a grammar: a `State` is where a text stands, `Said` is what an engine says there.

States that an engine cannot tell apart within one token share their `Said` (see counts.py).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from sglite.grammar.automaton.positions import Frame, Position
from sglite.grammar.automaton.regex import Regex
from sglite.grammar.automaton.strings import PartTable
from sglite.grammar.matcher import OVER, Bitmask, SharedMask


class Said:
    """`mask` and, where text is forced, `forced` and `ahead` are None until an engine was asked.

    And what came of it, as far as somebody counts: see sglite.runtime.scheduler.odds."""

    __slots__ = ("ahead", "draws", "followed", "forced", "hits", "likely", "mask", "runs")

    def __init__(self, *, finished: bool = False, is_forced: bool = False) -> None:
        self.mask: SharedMask | None = None
        self.forced: tuple[int, ...] | None = None if is_forced else ()
        self.ahead: int | None = None if is_forced else OVER if finished else 0  # what a BatchAdvancer says here
        self.draws = self.runs = self.hits = 0
        self.likely: tuple[int, ...] = ()
        self.followed: dict[tuple[int, ...], int] | None = None


class State:
    """`position` None: inside a string, and not looked at yet."""

    __slots__ = (
        "can_stop",
        "finished",
        "inside",
        "next",
        "part",
        "position",
        "room",
        "run",
        "said",
    )

    def __init__(self, position: Position | None, said: Said, *, finished: bool = False) -> None:
        self.position = position
        self.said = said
        self.next: dict[int, State] = {}  # by token; what was taken before
        self.run: Run | None = None  # what is forced here, once its moves are known
        self.can_stop = position is not None and position.can_end
        self.finished = finished
        self.inside: Inside | None = None  # a string, and then where in it:
        self.part = 0
        self.room = 0


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Forced tokens, and the state after each."""

    tokens: tuple[int, ...]
    states: tuple[State, ...]


class InsideSaid:
    """What an engine says inside of strings that it cannot tell apart."""

    __slots__ = ("closers", "loose", "places")

    def __init__(self) -> None:
        self.closers: dict[int, tuple[int, Bitmask] | None] = {}
        # by part: room and the closing tokens that fit it; None: an engine's mask is not what the tables say
        self.loose: dict[int, SharedMask] = {}  # by part: the mask with more room than any token needs
        self.places: dict[tuple[int, int], Said] = {}  # by part and room


class Inside:
    """The inside of one string: all its places lead to the same continuations. `exact`: what the automaton says of a
    move behind it is the engine's word too."""

    __slots__ = ("behind", "elsewhere", "exact", "frame", "next", "said", "states", "tables", "tail")

    def __init__(
        self, frame: Frame | None, tail: Regex, tables: list[PartTable], said: InsideSaid, *, exact: bool
    ) -> None:
        self.tables = tables
        self.exact = exact
        self.frame = frame
        self.tail = tail  # of the terminal, from the closing quote on
        self.said = said
        self.behind: Position | None = None  # the quote
        self.states: dict[tuple[int, int], State] = {}  # by part and room
        self.elsewhere: dict[tuple[int, int], Position] = {}  # the same, where text is forced or there is no room
        self.next: dict[tuple[int, int], State] = {}  # by part and token that closes it


class MaskShelf:
    """All masks that are remembered: when they are too many bytes, the oldest are made again when needed."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._bytes = 0
        self._masks: deque[tuple[Said, SharedMask]] = deque()

    def put(self, said: Said, words: Bitmask) -> SharedMask:
        mask = said.mask = SharedMask(words)
        self._masks.append((said, mask))
        self._bytes += words.nbytes
        while self._bytes > self._most and len(self._masks) > 1:
            owner, old = self._masks.popleft()
            self._bytes -= old.words.nbytes
            if owner.mask is old:
                owner.mask = None
        return mask
