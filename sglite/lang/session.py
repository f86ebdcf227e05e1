"""One run of one program: what all its states share."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sglite.errors import ProgramError, SgliteError
from sglite.lang.bridge import Posts
from sglite.lang.client import Client, courtesy
from sglite.lang.nodes import GenParams
from sglite.lang.outlook import Outlook, Place
from sglite.lang.roles import Roles
from sglite.lang.timeline import Timeline
from sglite.lang.transcript import Segments, TextTranscript, TokenTranscript, Transcript
from sglite.protocol import Usage

if TYPE_CHECKING:
    from sglite.lang.branch import Branch
    from sglite.lang.early import Early
    from sglite.lang.habits import Habits
    from sglite.lang.prefix import PrefixGate
    from sglite.lang.together import Together


@dataclass(eq=False, kw_only=True)
class Session:
    """`index`: the program's number in a batch. `loop` carries out all operations; everything else is read and written
    from several threads and kept simple enough for that (counters, sets under `lock`)."""

    name: str  # the program's function
    client: Client
    loop: asyncio.AbstractEventLoop
    posts: Posts  # to that loop
    defaults: GenParams
    roles: Roles
    segments: Segments | None  # None: the client takes text
    index: int | None = None
    stream: bool = False
    gate: PrefixGate | None = None
    together: Together | None = None
    plan: Mapping[Place, Outlook] = field(default_factory=dict)  # of a compiled program
    habits: Habits | None = None  # of its program, where calls may be sent early
    program_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    arrival: float = field(default_factory=time.monotonic)
    usage: Usage = Usage()
    error: ProgramError | None = None
    cancelled: str | None = None  # why
    cut: bool = False  # cancelled with something to do
    timeline: Timeline | None = None
    warmed_tokens: int = 0  # of the first prompt, computed once for the whole batch
    returned: Future[None] = field(default_factory=Future)  # done when the program's function has ended
    over: Future[None] = field(default_factory=Future)  # done when all is, and `error` is known
    lock: threading.RLock = field(default_factory=threading.RLock)
    busy: set[Branch] = field(default_factory=set)  # states with operations to carry out
    early: set[Early] = field(default_factory=set)  # calls sent before their turn that were not taken yet
    held: set[str] = field(default_factory=set)  # requests whose rows the client keeps for this program
    failed: list[Branch] = field(default_factory=list)  # states whose error nobody has seen yet
    inner: set[Session] = field(default_factory=set)  # programs that this one's function runs
    last_step: int = 0
    _steps: Iterator[int] = field(default_factory=itertools.count)
    _branches: Iterator[int] = field(default_factory=itertools.count)

    def next_step(self) -> int:
        self.last_step = next(self._steps)
        return self.last_step

    def next_branch(self) -> int:
        """As the program's graph counts its states."""
        return next(self._branches)

    def request_id(self, place: Place) -> str:
        return f"{self.program_id}-{place[0]}.{place[1]}"

    def new_transcript(self) -> Transcript:
        return TextTranscript() if self.segments is None else TokenTranscript(self.segments)

    def __post_init__(self) -> None:
        self.after_you = courtesy(self.client)

    def add_usage(self, usage: Usage) -> None:
        with self.lock:
            self.usage = self.usage + usage

    def wrap(self, error: BaseException, *, step: int | None = None, variable: str | None = None) -> ProgramError:
        """The error with where it happened; one that says so already keeps its place."""
        if isinstance(error, ProgramError) and (
            error.program is None or (error.program == self.index and error.run in (None, self.program_id))
        ):
            error.program = self.index
            return error
        if variable is None and isinstance(error, SgliteError):
            variable = error.variable
        parts = [f"program {self.name}" if self.index is None else f"program {self.index} ({self.name})"]
        parts += [] if step is None else [f"step {step}"]
        parts += [] if variable is None else [f"variable {variable!r}"]
        where = ", ".join(parts)
        made = ProgramError(
            f"{where}: {type(error).__name__}: {_text(error)}", program=self.index, step=step, variable=variable
        )
        made.status, made.run = getattr(error, "status", made.status), self.program_id
        made.__cause__ = error
        return made

    def busy_branches(self) -> list[Branch]:
        with self.lock:
            return list(self.busy)

    def cancel(self, reason: str) -> None:
        """Stop all states; reads in them raise, and nothing can be appended any more. So do the programs that the
        function runs: it cannot go on before they end."""
        with self.lock:  # a state that becomes busy later sees the flag
            self.cancelled = self.cancelled or reason
            busy, inner = list(self.busy), list(self.inner)
            self.cut = self.cut or bool(busy)
        for branch in busy:
            branch.cancel(reason)
        for session in inner:
            session.cancel(reason)

    @contextlib.contextmanager
    def running(self, notify: Callable[[], None]) -> Generator[None]:
        """Around the run: programs that its function calls are known by their context to be its own. `notify`: on the
        program loop, when all is over."""
        known = _running.get()
        outer = None if known is None else known()
        if outer is not None:
            outer._begin_inner(self)
        token = _running.set(weakref.ref(self))
        try:
            yield
        finally:
            _running.reset(token)
            self.over.set_result(None)
            self.posts.post(notify)
            if outer is not None:
                with outer.lock:
                    outer.inner.discard(self)

    def _begin_inner(self, session: Session) -> None:
        with self.lock:
            self.inner.add(session)
            cancelled = self.cancelled
        if cancelled is not None:
            session.cancel(cancelled)


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as problem:  # noqa: BLE001 - of somebody's exception class: the error is told all the same
        return f"(its text cannot be told: {type(problem).__name__})"


_running: contextvars.ContextVar[weakref.ref[Session] | None] = contextvars.ContextVar("program", default=None)
"""The program whose function this code is a part of. Weak: open connections keep the context that they were made in."""
