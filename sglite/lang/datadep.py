"""What ends a trace: the program looks at a value that only a run has."""

from __future__ import annotations

from contextvars import ContextVar


class DataDependent(BaseException):
    """Not an Exception: a program's own handler must not take it."""


tracing: ContextVar[bool] = ContextVar("sglite_tracing", default=False)
"""Set while a program is traced, so that a program it calls does not run for real."""


def refuse_in_trace(what: str) -> None:
    """Raises DataDependent inside a trace."""
    if tracing.get():
        raise DataDependent(what)
