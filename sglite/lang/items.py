"""What a running state works with: operations in its queue, and the slots that they fill."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sglite.lang.nodes import Gen, Node, ScopeEnd, Select, SeparateReasoning

if TYPE_CHECKING:
    from sglite.lang.branch import Branch


class Later:
    """A meta info that is made when somebody asks for it, which hardly anybody does."""

    __slots__ = ("_made", "_make")

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make: Callable[[], Any] | None = make
        self._made: Any = None

    def get(self) -> Any:
        make = self._make  # another thread may ask at the same time
        if make is not None:
            self._made = make()
            self._make = None
        return self._made


def told(meta: Any) -> Any:
    """The meta info itself, or those of a list."""
    if isinstance(meta, Later):
        return meta.get()
    return [told(one) for one in meta] if isinstance(meta, list) else meta


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a variable holds. `raw`: the text (a list of them for n > 1 or after a join) that `value` was made of.
    `meta`: see `told`."""

    value: Any
    raw: Any
    meta: Any = None


@dataclass(eq=False, slots=True)
class Slot:
    """A variable's binding. `pieces`: its text as it streams in, each with the meta info of its output."""

    future: Future[Outcome] = field(default_factory=Future)
    pieces: list[tuple[str, Any]] = field(default_factory=list)


def common(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """How many leading ids are the same."""
    size = min(len(first), len(second))
    if first[:size] == second[:size]:
        return size
    return next(i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)


@dataclass(frozen=True, slots=True)
class Held:
    """A row that the client keeps: the request that made it and the token ids that it holds."""

    request_id: str
    ids: tuple[int, ...]

    def shared(self, ids: tuple[int, ...]) -> int:
        """Leading ids that the row holds too."""
        return common(self.ids, ids)


@dataclass(frozen=True, slots=True)
class Fork(Node):
    """Give every child what this state has said up to here."""

    children: tuple[Branch, ...]


@dataclass(frozen=True, slots=True)
class Said:
    """By one state up to some operation: its whole text and complete messages, and those since it was forked."""

    text: str
    messages: list[dict[str, Any]]
    text_since_fork: str
    messages_since_fork: list[dict[str, Any]]


NOTHING_SAID = Said("", [], "", [])


@dataclass(frozen=True, slots=True)
class Snapshot(Node):
    """Complete `future` with what was said up to here; with nothing where only the moment is wanted."""

    future: Future[Said]
    wanted: bool = True


@dataclass(frozen=True, slots=True)
class Concatenate(Node):
    """Append what forks had said when they were joined: they may have gone on since."""

    said: tuple[Said, ...]


@dataclass(frozen=True, slots=True)
class Item:
    node: Node
    step: int
    slots: dict[str, Slot]


def names_set(node: Node) -> tuple[str, ...]:
    """The variables that a node sets."""
    match node:
        case Gen(name=str(name)) | Select(name=str(name)) | ScopeEnd(name):
            return (name,)
        case SeparateReasoning(names=names):
            return (*names, *(f"{name}_reasoning_content" for name in names))
        case _:
            return ()
