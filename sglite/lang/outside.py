"""The state of a program that still runs, for those who did not write it: whoever called `run(stream=True)`.

What is asked of the whole program waits until its function has ended; a variable waits until the function has bound it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from sglite.errors import ProgramError
from sglite.lang.branch import Branch
from sglite.lang.bridge import until_done, wait
from sglite.lang.nodes import Node
from sglite.lang.state import OnError
from sglite.lang.timeline import Timeline
from sglite.protocol import Usage


class Outside:
    """Satisfies `state.StateCore`."""

    def __init__(self, branch: Branch) -> None:
        self._branch = branch

    def _returned(self, name: str | None = None) -> Branch:
        if name is None or name not in self._branch.slots:
            wait(self._branch.session.returned)
        return self._branch

    def _succeeded(self, name: str | None = None) -> Branch:
        """Raises what the program failed with, except for a variable that it had bound by then."""
        branch = self._returned(name)
        error = branch.session.error
        if error is not None and (name is None or name not in branch.slots):
            raise error from error.__cause__
        return branch

    def append(self, node: Node) -> None:
        self._returned().append(node)

    def read(self, name: str) -> Any:
        return self._succeeded(name).read(name)

    async def read_async(self, name: str) -> Any:
        if name not in self._branch.slots:
            await until_done(self._branch.session.returned)
        return await self._succeeded(name).read_async(name)

    def raw(self, name: str) -> Any:
        return self._succeeded(name).raw(name)

    def meta(self, name: str) -> Any:
        return self._succeeded(name).meta(name)

    def assign(self, name: str, value: Any) -> None:
        self._returned().assign(name, value)

    def has(self, name: str) -> bool:
        return self._branch.has(name)

    def fork(self, size: int) -> Sequence[Branch]:
        return self._returned().fork(size)

    def gather(self, children: Sequence[Branch], *, on_error: OnError, scalar: bool = False) -> None:
        self._returned().gather(children, on_error=on_error, scalar=scalar)

    def concatenate(self, children: Sequence[Branch]) -> None:
        self._returned().concatenate(children)

    def sync(self) -> None:
        wait(self._branch.session.over)
        self._succeeded().sync()

    def text(self) -> str:
        return self._succeeded().text()

    def messages(self) -> list[dict[str, Any]]:
        return self._succeeded().messages()

    def error(self) -> ProgramError | None:
        wait(self._branch.session.over)  # a fork may fail after the state itself has all it needs
        return self._branch.error()

    def cancel(self, reason: str) -> None:
        self._branch.session.cancel(reason)

    def can_append(self) -> bool:
        return False

    def usage(self) -> Usage:
        return self._branch.usage()

    def timeline(self) -> Timeline | None:
        return self._branch.timeline()

    def warmed_tokens(self) -> int:
        return self._branch.warmed_tokens()

    def text_iter(self, name: str | None) -> Iterator[str]:
        return self._branch.text_iter(name)

    def text_async_iter(self, name: str | None, *, with_meta: bool) -> AsyncIterator[Any]:
        return self._branch.text_async_iter(name, with_meta=with_meta)
