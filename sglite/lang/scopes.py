"""Messages and variable scopes open and close in pairs: checked when operations are appended."""

from __future__ import annotations

from collections.abc import Sequence

from sglite.errors import ProgramSyntaxError
from sglite.lang.nodes import Image, Node, RoleBegin, RoleEnd, ScopeBegin, ScopeEnd


class OpenScopes:
    """What is open in one state."""

    def __init__(self, role: str | None = None) -> None:
        self._role = role
        self._names: list[str] = []

    def for_fork(self) -> OpenScopes:
        """A fork inside a message may end it; a parent's variable scope is the parent's."""
        return OpenScopes(self._role)

    def check(self, nodes: Sequence[Node]) -> None:
        """Raises ProgramSyntaxError, and then changes nothing."""
        role, names = self._role, list(self._names)
        for node in nodes:
            match node:
                case RoleBegin(name):
                    if role is not None:
                        raise ProgramSyntaxError(f"a {name} message cannot begin inside a {role} message")
                    role = name
                case RoleEnd(name):
                    if role != name:
                        raise ProgramSyntaxError(f"no {name} message is open that could end here")
                    role = None
                case ScopeBegin(name):
                    names.append(name)
                case ScopeEnd(name):
                    if name not in names:
                        raise ProgramSyntaxError(f"no scope {name!r} is open that could end here")
                    names.remove(name)
                case Image():
                    raise ProgramSyntaxError("no supported model takes images or videos; send text only")
                case _:
                    pass
        self._role, self._names = role, names
