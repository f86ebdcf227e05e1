"""Many runs of one program at once, their states in the order of the arguments."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any, Literal

from sglite.errors import ProgramError, ProgramSyntaxError
from sglite.lang.bridge import until_done, wait
from sglite.lang.config import client_or_default
from sglite.lang.datadep import refuse_in_trace
from sglite.lang.nodes import GenParams
from sglite.lang.prefix import PrefixGate
from sglite.lang.program import Program
from sglite.lang.runner import Run
from sglite.lang.state import OnError, ProgramState
from sglite.lang.together import Together

if TYPE_CHECKING:
    from rich.progress import Progress

AUTO_PROGRAMS = 1024  # at the same time, unless num_threads says otherwise


class Batch:
    """Iterate it once, with `for` or `async for`. Nothing runs before."""

    def __init__(
        self,
        program: Program,
        arguments: Sequence[Mapping[str, Any]],
        params: GenParams,
        *,
        backend: Any,
        limit: int | Literal["auto"],
        progress_bar: bool,
        on_error: OnError,
    ) -> None:
        """Raises ProgramSyntaxError."""
        if limit != "auto" and (not isinstance(limit, int) or limit < 1):
            raise ProgramSyntaxError(f"num_threads must be 'auto' or at least 1, not {limit!r}", param="num_threads")
        if on_error not in ("raise", "return"):
            raise ProgramSyntaxError(f"on_error must be 'raise' or 'return', not {on_error!r}", param="on_error")
        refuse_in_trace(f"a batch of program {program.name}")
        self._program = program
        self._arguments = arguments
        self._params = params
        self._client = client_or_default(backend)
        self._limit = AUTO_PROGRAMS if limit == "auto" else limit
        self._progress_bar = progress_bar
        self._on_error = on_error
        self._several = min(len(arguments), self._limit) > 1
        self._gate = PrefixGate() if self._several and self._client.tokenizer is not None else None
        self._together = Together()
        self._context = contextvars.copy_context()
        self._lock = threading.Lock()
        self._runs: dict[int, Run] = {}  # running, by index
        self._done: dict[int, Run] = {}  # finished, not handed out yet
        self._next = 0
        self._given = 0
        self._error: ProgramError | BaseException | None = None
        self._news: Future[None] = Future()  # completed when a run ends
        self._whole = False  # nobody looks at a state before all are there

    def states(self) -> list[ProgramState]:
        """All of them. The reader sleeps until the last one is there, or one fails."""
        self._whole = True
        return list(self)

    def __iter__(self) -> Iterator[ProgramState]:
        with _Bar(self._progress_bar, len(self._arguments)) as bar:
            try:
                while self._given < len(self._arguments):
                    ready, news = self._advance()
                    bar.show(self._given + len(self._done))
                    yield from ready
                    if not ready:
                        wait(news)
            finally:
                self._stop()

    async def __aiter__(self) -> AsyncGenerator[ProgramState]:
        with _Bar(self._progress_bar, len(self._arguments)) as bar:
            try:
                while self._given < len(self._arguments):
                    ready, news = self._advance()
                    bar.show(self._given + len(self._done))
                    for state in ready:
                        yield state
                    if not ready:
                        await until_done(news)
            finally:
                self._stop()

    def _advance(self) -> tuple[list[ProgramState], Future[None]]:
        """The states that can be handed out now, else what to wait for."""
        ready: list[ProgramState] = []
        with self._lock:
            if self._error is not None:
                raise self._error
            while (run := self._done.pop(self._given, None)) is not None:
                ready.append(run.state)
                self._given += 1
            news = self._news
        self._start_more()
        return ready, news

    def _start_more(self) -> None:
        """Start what may start. Called where a program has ended too: its place is taken before its reader wakes."""
        started: list[Run] = []
        with self._lock:
            # A slow reader stops the batch from running ahead, so that memory stays flat.
            end = len(self._arguments) if self._whole else min(len(self._arguments), self._given + 2 * self._limit)
            while self._error is None and self._next < end and len(self._runs) < self._limit:
                started.append(self._new_run(self._next))
                self._next += 1
            self._together.starting += len(started)
        for run in started:
            future = self._context.copy().run(run.start)
            with self._lock:
                self._together.starting -= 1
            future.add_done_callback(lambda future, run=run: self._ended(run, future))

    def _new_run(self, index: int) -> Run:
        run = Run(
            self._program,
            self._arguments[index],
            self._params,
            client=self._client,
            index=index,
            gate=self._gate,
            together=self._together if self._several else None,
        )
        self._runs[index] = run
        return run

    def _ended(self, run: Run, future: Future[ProgramState]) -> None:
        index = run.session.index
        assert index is not None
        error = CancelledError("the program was cancelled") if future.cancelled() else future.exception()
        with self._lock:
            self._runs.pop(index, None)
            self._done[index] = run
            if error is not None and (self._on_error == "raise" or not isinstance(error, ProgramError)):
                self._error = self._error or error
        try:
            self._start_more()
        except Exception as problem:  # noqa: BLE001 - raised in the batch's reader, as where it starts them itself
            with self._lock:
                self._error = self._error or problem
        with self._lock:
            left = len(self._arguments) - self._given - len(self._done)
            if self._whole and not self._progress_bar and left and self._error is None:
                return
            news, self._news = self._news, Future()
        news.set_result(None)

    def _stop(self) -> None:
        """Programs that still run have nobody to run for: an error was raised, or the reader has gone."""
        with self._lock:
            running = list(self._runs.values())
            self._next = len(self._arguments)
        for run in running:
            run.cancel("another program of the batch failed, or its reader has gone")


class _Bar:
    """A progress bar on the terminal, or nothing."""

    def __init__(self, wanted: bool, total: int) -> None:
        self._progress: Progress | None = None
        if wanted:
            from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn  # only where a bar is wanted

            progress = Progress(*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
            self._task = progress.add_task("programs", total=total)
            self._progress = progress

    def __enter__(self) -> _Bar:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def show(self, completed: int) -> None:
        if self._progress is not None:
            self._progress.update(self._task, completed=completed)
