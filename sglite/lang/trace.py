"""A program run against placeholders becomes a graph of its operations.

What a model would write, and arguments that are not given, are `Placeholder`s. They can be appended, put into
f-strings and passed on; as soon as the program looks at one (compares it, branches on it, counts with it) the trace
ends there, and the graph says so.

In an f-string a placeholder is spelled as a mark, which is found again when the text is appended. The mark begins and
ends with a blank and mixes cases, so that most string methods on the text destroy it and are noticed.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from sglite.errors import ProgramError
from sglite.lang.bridge import coroutine_loop
from sglite.lang.datadep import DataDependent, tracing
from sglite.lang.lower import DEFAULT_MAX_TOKENS
from sglite.lang.nodes import (
    Gen,
    GenParams,
    Node,
    RoleBegin,
    RoleEnd,
    ScopeBegin,
    ScopeEnd,
    Select,
    SeparateReasoning,
    Text,
    flatten,
)
from sglite.lang.program import Program
from sglite.lang.scopes import OpenScopes
from sglite.lang.state import OnError, ProgramState
from sglite.lang.timeline import Timeline
from sglite.protocol import GraphNode, ProgramGraph, Usage

_MARK = re.compile(" \ue000sGl(\\d+)\ue001 ")
_BROKEN = re.compile("[\ue000\ue001]")


class Placeholder:
    """A value that only a run has."""

    __slots__ = ("_number", "_tracer")

    def __init__(self, tracer: _Tracer, number: int) -> None:
        self._tracer = tracer
        self._number = number

    def __sglite_node__(self) -> Node:
        return _Hole(self._number)

    def __str__(self) -> str:
        self._tracer.exact = False
        return f" \ue000sGl{self._number}\ue001 "

    def __format__(self, spec: str) -> str:
        if spec:
            self._look(f"format {spec!r}")
        return str(self)

    def __add__(self, other: object) -> Node:
        return _Hole(self._number) + other

    def __radd__(self, other: object) -> Node:
        return other + _Hole(self._number)

    def __repr__(self) -> str:
        return f"<{self._tracer.label(self._number)}>"

    def _look(self, how: str) -> NoReturn:
        raise DataDependent(f"{self._tracer.label(self._number)} ({how})")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._look(f".{name}")

    def __bool__(self) -> bool:
        self._look("its truth")

    def __eq__(self, other: object) -> bool:
        self._look(f"== {other!r}" if not isinstance(other, Placeholder) else "==")

    def __hash__(self) -> int:
        self._look("its hash")

    def __len__(self) -> int:
        self._look("its length")

    def __iter__(self) -> Iterator[Any]:
        self._look("its items")

    def __getitem__(self, key: object) -> Any:
        self._look(f"[{key!r}]")

    def __contains__(self, item: object) -> bool:
        self._look("in")

    def __int__(self) -> int:
        self._look("int")

    def __float__(self) -> float:
        self._look("float")

    def __index__(self) -> int:
        self._look("as a number")

    def __lt__(self, other: object) -> bool:
        self._look("<")

    def __le__(self, other: object) -> bool:
        self._look("<=")

    def __gt__(self, other: object) -> bool:
        self._look(">")

    def __ge__(self, other: object) -> bool:
        self._look(">=")


@dataclass(frozen=True, slots=True)
class _Hole(Node):
    """A placeholder where text is expected."""

    number: int


@dataclass(frozen=True, slots=True)
class _Origin:
    """Where a placeholder's value comes from: an argument, or node `source`'s variable."""

    name: str
    source: int | None = None


class _Tracer:
    def __init__(self) -> None:
        self.nodes: list[GraphNode] = []
        self.exact = True
        self._origins: list[_Origin] = []
        self._steps = itertools.count()
        self._branches = itertools.count()

    def placeholder(self, origin: _Origin) -> Placeholder:
        self._origins.append(origin)
        return Placeholder(self, len(self._origins) - 1)

    def label(self, number: int) -> str:
        origin = self._origins[number]
        return f"argument {origin.name!r}" if origin.source is None else f"variable {origin.name!r}"

    def next_branch(self) -> int:
        return next(self._branches)

    def next_step(self) -> int:
        return next(self._steps)

    def add(self, node: GraphNode) -> int:
        self.nodes.append(node)
        return len(self.nodes) - 1

    def hole(self, number: int, branch: int, step: int) -> None:
        origin = self._origins[number]
        op = "argument" if origin.source is None else "variable"
        self.add(GraphNode(op=op, branch=branch, step=step, name=origin.name, source=origin.source))


class _TraceCore:
    """A state that only writes down what is appended. Satisfies `state.StateCore`."""

    def __init__(self, tracer: _Tracer, parent: _TraceCore | None = None) -> None:
        self._tracer = tracer
        self.branch = tracer.next_branch()
        self._values: dict[str, Any] = {} if parent is None else dict(parent._values)
        self._scopes = OpenScopes() if parent is None else parent._scopes.for_fork()
        self.assigned: dict[str, None] = {}

    def append(self, node: Node) -> None:
        nodes = flatten(node)
        self._scopes.check(nodes)
        for each in nodes:
            self._append(each, self._tracer.next_step())

    def _append(self, node: Node, step: int) -> None:
        tracer, branch = self._tracer, self.branch
        match node:
            case Text(text):
                self._text(text, step)
            case _Hole(number):
                tracer.hole(number, branch, step)
            case Gen():
                made = tracer.add(
                    GraphNode(
                        op="gen",
                        branch=branch,
                        step=step,
                        name=node.name,
                        params=node.params.over(GenParams(max_tokens=DEFAULT_MAX_TOKENS)).sampling_params(),
                        grammar=node.grammar,
                    )
                )
                self._bind(node.name, made)
            case Select():
                made = tracer.add(
                    GraphNode(
                        op="select",
                        branch=branch,
                        step=step,
                        name=node.name,
                        choices=node.choices,
                        method=node.method.name,
                        temperature=node.temperature,
                    )
                )
                self._bind(node.name, made)
            case RoleBegin(name) | RoleEnd(name) | ScopeBegin(name):
                ops = {RoleBegin: "role_begin", RoleEnd: "role_end", ScopeBegin: "scope_begin"}
                tracer.add(GraphNode(op=ops[type(node)], branch=branch, step=step, name=name))  # type: ignore[arg-type]
            case ScopeEnd(name):
                self._bind(name, tracer.add(GraphNode(op="scope_end", branch=branch, step=step, name=name)))
            case SeparateReasoning(names=names):
                for name in names:
                    made = tracer.add(GraphNode(op="reasoning", branch=branch, step=step, name=name))
                    self._bind(name, made)
                    self._bind(f"{name}_reasoning_content", made)
            case _:
                raise AssertionError(f"unknown node {node!r}")

    def _text(self, text: str, step: int) -> None:
        position = 0
        for mark in _MARK.finditer(text):
            self._plain(text[position : mark.start()], step)
            self._tracer.hole(int(mark[1]), self.branch, step)
            position = mark.end()
        self._plain(text[position:], step)

    def _plain(self, text: str, step: int) -> None:
        if _BROKEN.search(text):
            raise DataDependent("a string method on a value that is not there")
        if text:
            self._tracer.add(GraphNode(op="text", branch=self.branch, step=step, text=text))

    def _bind(self, name: str | None, source: int) -> None:
        if name is not None:
            self._values[name] = self._tracer.placeholder(_Origin(name, source))
            self.assigned[name] = None

    def read(self, name: str) -> Any:
        if name not in self._values:
            raise KeyError(f"the program has not set {name!r}")
        return self._values[name]

    async def read_async(self, name: str) -> Any:
        return self.read(name)

    def raw(self, name: str) -> Any:
        return self.read(name)

    def meta(self, name: str) -> Any:
        raise DataDependent(f"the meta info of {name!r}")

    def assign(self, name: str, value: Any) -> None:
        self._values[name] = value
        self.assigned[name] = None

    def has(self, name: str) -> bool:
        return name in self._values

    def fork(self, size: int) -> Sequence[_TraceCore]:
        step = self._tracer.next_step()
        children = [_TraceCore(self._tracer, self) for _ in range(size)]
        self._group("fork", children, step)
        return children

    def gather(self, children: Sequence[_TraceCore], *, on_error: OnError, scalar: bool = False) -> None:
        self._group("join", children, -1)
        for name in dict.fromkeys(name for child in children for name in child.assigned):
            values = [child._values.get(name) for child in children]
            self.assign(name, values[0] if scalar else values)

    def concatenate(self, children: Sequence[_TraceCore]) -> None:
        self._group("concatenate", children, self._tracer.next_step())

    def _group(self, op: Any, children: Sequence[_TraceCore], step: int) -> None:
        numbers = tuple(child.branch for child in children)
        self._tracer.add(GraphNode(op=op, branch=self.branch, step=step, children=numbers))

    def sync(self) -> None:
        """Nothing is pending in a trace."""

    def text(self) -> str:
        raise DataDependent("the state's text")

    def messages(self) -> list[dict[str, Any]]:
        raise DataDependent("the state's messages")

    def error(self) -> ProgramError | None:
        return None

    def cancel(self, reason: str) -> None:
        """Nothing runs."""

    def can_append(self) -> bool:
        return True

    def usage(self) -> Usage:
        raise DataDependent("the state's usage")

    def timeline(self) -> Timeline | None:
        return None

    def warmed_tokens(self) -> int:
        return 0

    def text_iter(self, name: str | None) -> Iterator[str]:
        raise DataDependent("the state's stream")

    def text_async_iter(self, name: str | None, *, with_meta: bool) -> AsyncIterator[Any]:
        raise DataDependent("the state's stream")


def trace(program: Program, arguments: dict[str, Any]) -> ProgramGraph:
    """`arguments` by name; those that are left open become placeholders, where they have no default."""
    tracer = _Tracer()
    given = {**program.bound, **arguments}
    opened = [name for name in program.required_names if name not in given]
    given |= {name: tracer.placeholder(_Origin(name)) for name in opened}
    state = ProgramState(_TraceCore(tracer))
    stopped = ""
    token = tracing.set(True)
    try:
        result = program.func(state, **given)
        if inspect.isawaitable(result):
            coroutine_loop().run(_awaited(result))
    except DataDependent as looked:
        stopped = str(looked)
    except Exception as error:
        if tracer.nodes or opened:
            stopped = f"{type(error).__name__}: {error}"
        else:
            raise
    finally:
        tracing.reset(token)
    return ProgramGraph(
        name=program.name,
        nodes=tuple(tracer.nodes),
        arguments=tuple(opened),
        complete=not stopped,
        exact=tracer.exact,
        stopped=stopped,
    )


async def _awaited(value: Any) -> Any:
    return await value
