"""The state `s` of a program, and the group of states that a fork makes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, Protocol, overload

from sglite.errors import ProgramError, ProgramSyntaxError, SgliteError
from sglite.lang.bridge import state_scope
from sglite.lang.nodes import Node, RoleBegin, RoleEnd, ScopeBegin, ScopeEnd, as_node, flatten
from sglite.lang.nodes import Sequence as NodeSequence
from sglite.lang.timeline import Timeline
from sglite.protocol import Usage

OnError = Literal["raise", "return"]


class StateCore(Protocol):
    """What carries a state out: a running one (branch.py) or a traced one (trace.py)."""

    def append(self, node: Node) -> None: ...
    def read(self, name: str) -> Any: ...
    async def read_async(self, name: str) -> Any: ...
    def raw(self, name: str) -> Any: ...
    def meta(self, name: str) -> Any: ...
    def assign(self, name: str, value: Any) -> None: ...
    def has(self, name: str) -> bool: ...
    def fork(self, size: int) -> Sequence[StateCore]: ...
    def gather(self, children: Sequence[Any], *, on_error: OnError, scalar: bool = False) -> None: ...
    def concatenate(self, children: Sequence[Any]) -> None: ...
    def sync(self) -> None: ...
    def text(self) -> str: ...
    def messages(self) -> list[dict[str, Any]]: ...
    def error(self) -> ProgramError | None: ...
    def cancel(self, reason: str) -> None: ...
    def can_append(self) -> bool: ...
    def usage(self) -> Usage: ...
    def timeline(self) -> Timeline | None: ...
    def warmed_tokens(self) -> int: ...
    def text_iter(self, name: str | None) -> Iterator[str]: ...
    def text_async_iter(self, name: str | None, *, with_meta: bool) -> AsyncIterator[Any]: ...


class ProgramState:
    """What a program appends to and reads from. Appending does not wait; reading waits for what it reads."""

    def __init__(self, core: StateCore) -> None:
        self._core = core
        self.ret_value: Any = None  # what the program's function returned

    def __iadd__(self, other: object) -> ProgramState:
        self._core.append(as_node(other))
        return self

    def __getitem__(self, name: str) -> Any:
        return self._core.read(name)

    def __setitem__(self, name: str, value: Any) -> None:
        self._core.assign(name, value)

    def __contains__(self, name: str) -> bool:
        """Whether the program has set it, or has appended what will."""
        return self._core.has(name)

    def __repr__(self) -> str:
        """Waits for the text; of a state that has failed, says why instead of raising it."""
        try:
            return f"ProgramState({self.text()})"
        except SgliteError as error:
            return f"ProgramState(failed: {error})"

    def get_var(self, name: str) -> Any:
        return self._core.read(name)

    def set_var(self, name: str, value: Any) -> None:
        self._core.assign(name, value)

    def get(self, name: str, default: Any = None) -> Any:
        """`s[name]`, or `default` where the program has not set it."""
        try:
            return self._core.read(name)
        except KeyError:
            return default

    async def get_async(self, name: str) -> Any:
        """`s[name]` with an await, for tasks that an async program starts itself."""
        return await self._core.read_async(name)

    def raw(self, name: str) -> Any:
        """The text that `s[name]` was made of."""
        return self._core.raw(name)

    def get_meta_info(self, name: str) -> Any:
        """Token counts, finish reason, log-probabilities of the call that set `name` (a list after a join)."""
        return self._core.meta(name)

    @overload
    def system(self, expr: None = None) -> AbstractContextManager[None]: ...
    @overload
    def system(self, expr: object) -> Node: ...
    def system(self, expr: object = None) -> AbstractContextManager[None] | Node:
        return self._role("system", expr)

    @overload
    def user(self, expr: None = None) -> AbstractContextManager[None]: ...
    @overload
    def user(self, expr: object) -> Node: ...
    def user(self, expr: object = None) -> AbstractContextManager[None] | Node:
        return self._role("user", expr)

    @overload
    def assistant(self, expr: None = None) -> AbstractContextManager[None]: ...
    @overload
    def assistant(self, expr: object) -> Node: ...
    def assistant(self, expr: object = None) -> AbstractContextManager[None] | Node:
        return self._role("assistant", expr)

    def var_scope(self, name: str) -> AbstractContextManager[None]:
        """What is appended inside `with s.var_scope(name):` becomes the variable `name`."""
        return self._scope(ScopeBegin(name), ScopeEnd(name))

    def fork(self, size: int = 1, position_ids_offset: list[int] | None = None) -> ForkGroup:
        """`size` states that begin where this one is and run side by side.

        `position_ids_offset` has no effect, as in SGLang. Raises ProgramSyntaxError for a size below 1.
        """
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ProgramSyntaxError(f"fork needs a whole number from 1, not {size!r}", param="size")
        return ForkGroup([ProgramState(core) for core in self._core.fork(size)], self)

    @contextmanager
    def copy(self, position_ids_offset: list[int] | None = None) -> Generator[ProgramState]:
        """`with s.copy() as t:` works on a copy; at the end the variables it set are set here, as they are."""
        group = self.fork(1)
        with state_scope():
            yield group[0]
        self._core.gather([group[0]._core], on_error="raise", scalar=True)

    def sync(self) -> None:
        """Wait until everything appended so far is carried out."""
        self._core.sync()

    def text(self) -> str:
        return self._core.text()

    def messages(self) -> list[dict[str, Any]]:
        """The complete messages of the chat, in the OpenAI form."""
        return self._core.messages()

    def error(self) -> ProgramError | None:
        """Waits, and gives what went wrong instead of raising it: a ProgramError whose `__cause__` is the exception of
        the program's code or of the call that failed (never the abort that it led to), None where nothing did."""
        return self._core.error()

    def cancel(self) -> None:
        """Stop this state; reads from it raise."""
        self._core.cancel("cancelled by the program")

    @property
    def usage(self) -> Usage:
        """Tokens of the whole program so far, its forks included."""
        return self._core.usage()

    @property
    def timeline(self) -> Timeline | None:
        """What happened when, of a run with `trace=True`."""
        return self._core.timeline()

    @property
    def warmed_tokens(self) -> int:
        """Tokens of the first prompt that were computed once for the whole batch (run_batch)."""
        return self._core.warmed_tokens()

    def text_iter(self, var_name: str | None = None) -> Iterator[str]:
        """The text, or one variable's, as it comes; waits for a variable that is not there yet."""
        return self._core.text_iter(var_name)

    def text_async_iter(self, var_name: str | None = None, return_meta_data: bool = False) -> AsyncIterator[Any]:
        """As text_iter; with `return_meta_data` (text, meta info) pairs of a variable."""
        return self._core.text_async_iter(var_name, with_meta=return_meta_data)

    def _role(self, role: str, expr: object) -> AbstractContextManager[None] | Node:
        if expr is None:
            return self._scope(RoleBegin(role), RoleEnd(role))
        node = NodeSequence((RoleBegin(role), *flatten(as_node(expr)), RoleEnd(role)))
        self._core.append(node)
        return node

    @contextmanager
    def _scope(self, begin: Node, end: Node) -> Generator[None]:
        self._core.append(begin)
        try:
            with state_scope():
                yield
        except BaseException:
            # The scope closes, so that a program which handles the error can go on; a failed state has said so already.
            if self._core.can_append():
                self._core.append(end)
            raise
        self._core.append(end)


class ForkGroup:
    """The states of one fork, like a list; `forks += x` appends to each."""

    def __init__(self, states: Sequence[ProgramState], source: ProgramState) -> None:
        self._states = list(states)
        self._source = source

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[ProgramState]:
        return iter(self._states)

    @overload
    def __getitem__(self, index: int) -> ProgramState: ...
    @overload
    def __getitem__(self, index: slice) -> list[ProgramState]: ...
    def __getitem__(self, index: int | slice) -> ProgramState | list[ProgramState]:
        return self._states[index]

    def __setitem__(self, index: int, value: ProgramState) -> None:
        """`forks[i] += x` ends in this; nothing else may be put there."""
        if self._states[index] is not value:
            raise ProgramSyntaxError("a fork cannot be replaced; append to it with forks[i] += ...")

    def __iadd__(self, other: object | Callable[[int], object] | Sequence[object]) -> ForkGroup:
        """The same to every fork; a function is called with each index; a list or tuple has one entry a fork."""
        if isinstance(other, Node | str):
            parts: list[object] = [other] * len(self)
        elif callable(other):
            parts = [other(i) for i in range(len(self))]
        elif isinstance(other, list | tuple):
            parts = list(other)
        else:
            parts = [as_node(other)] * len(self)
        if len(parts) != len(self):
            raise ProgramSyntaxError(f"{len(parts)} parts cannot be appended to {len(self)} forks, one to each")
        for state, part in zip(self._states, parts, strict=True):
            state += part
        return self

    def join(self, mode: str = "gather_variable", *, on_error: OnError = "raise") -> None:
        """Wait for all forks and bring their results back.

        gather_variable: for every variable that any fork has set since the fork, `s[name]` becomes a list with one
        entry a fork, in order: its value there (where a fork did not set it: what it had before the fork, else None).
        A variable that `s` had before and some fork has set again becomes that list too; others stay as they are.
        concate_and_append: the text of every fork since the fork is appended, in order.

        If a fork fails the others are stopped and its error is raised; with on_error="return" all run to their end and
        the error stands in the place of the failed fork's values.
        """
        cores = [state._core for state in self._states]
        if mode == "gather_variable":
            self._source._core.gather(cores, on_error=on_error)
        elif mode == "concate_and_append":
            self._source._core.concatenate(cores)
        else:
            raise ProgramSyntaxError(f"unknown join mode {mode!r}; use gather_variable or concate_and_append")

    def cancel(self) -> None:
        """Stop all forks."""
        for state in self._states:
            state.cancel()
