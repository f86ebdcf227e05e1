"""The step loop: commands in, one turn of the core, outputs out. The same in a thread and in a process."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

import msgspec

from sglite.errors import EngineDead, SgliteError
from sglite.grammar.matcher import CompiledGrammar
from sglite.protocol import ErrorInfo, RequestOutput, ScoreOutput
from sglite.runtime.async_engine import messages as m
from sglite.runtime.async_engine.courtesy import Courtesy
from sglite.runtime.async_engine.interpreter import collect_at_rest
from sglite.runtime.engine import EngineCore, GrammarService

log = logging.getLogger("sglite.engine")

# While nothing can run, how often the core still gets a turn: held rows and deadlines run out without a wake-up.
IDLE_TURN_S = 1.0
REST_AFTER_S = 0.1  # without a command: time to prepare what later requests would wait for
REST_PAUSE_S = 0.002  # between two pieces of that, for other threads


class Inbox(Protocol):
    def take(self, timeout: float) -> list[m.Command]:
        """What has come, in order. Blocks up to `timeout` seconds (0: not at all) while there is nothing; returns
        early, and maybe with nothing, after wake()."""
        ...

    def wake(self) -> None:
        """From any thread."""
        ...


class ThreadInbox:
    """Commands from threads of the same process."""

    def __init__(self) -> None:
        self._commands: deque[m.Command] = deque()
        self._changed = threading.Condition()
        self._woken = False

    def put(self, commands: list[m.Command]) -> None:
        with self._changed:
            self._commands.extend(commands)
            self._changed.notify()

    def wake(self) -> None:
        with self._changed:
            self._woken = True
            self._changed.notify()

    def take(self, timeout: float) -> list[m.Command]:
        if timeout == 0 and not self._commands:
            return []
        with self._changed:
            self._changed.wait_for(lambda: self._commands or self._woken, timeout)
            self._woken = False
            taken = list(self._commands)
            self._commands.clear()
        return taken


class StepLoop:
    """Runs a core until it is told to stop or the core breaks."""

    def __init__(
        self,
        core: EngineCore,
        grammars: GrammarService | None,
        inbox: Inbox,
        emit: Callable[[list[m.Event]], None],
        stats: Callable[[], dict[str, Any]],
        courtesy: Courtesy | None = None,
    ) -> None:
        """`emit` is called from the loop's thread only, at most once a turn. `courtesy`: of the other threads of this
        process."""
        self._courtesy = Courtesy() if courtesy is None else courtesy
        self._core = core
        self._grammars = grammars
        self._inbox = inbox
        self._emit = emit
        self._stats = stats
        self._late: deque[m.Event] = deque()  # replies made by other threads
        self._stopping = False
        self._next_rest = REST_AFTER_S  # seconds without a command until the core may rest
        self.turns = 0
        self.busy = False

    def run(self) -> None:
        """Returns after Stop, or after the core broke (then everybody has been told that the engine is dead)."""
        self._core.set_waker(self._inbox.wake)
        self._core.set_pauses(self._courtesy.rest, self._courtesy.work)
        try:
            while not self._stopping:
                self.busy = False
                idle, began = 0.0 if self._core.has_work else self._idle_time(), time.monotonic()
                if idle:
                    self._courtesy.rest()
                commands = self._inbox.take(idle)
                self._courtesy.work()
                if commands or not idle:
                    self._next_rest = REST_AFTER_S
                elif time.monotonic() - began >= self._next_rest:
                    self._next_rest = self._rest()
                self.busy = True
                self._turn(commands)
        except Exception as error:
            log.exception("the engine loop broke")
            self._emit([m.Died(ErrorInfo.of(EngineDead(f"the engine stopped: {type(error).__name__}: {error}")))])
        finally:
            self._courtesy.rest()
            self._core.close()

    def _rest(self) -> float:
        """Use the time that nobody wants. Returns in how many seconds there is more to do."""
        if self._core.rest():
            return REST_PAUSE_S
        collect_at_rest()
        return IDLE_TURN_S

    def _idle_time(self) -> float:
        """Seconds until the core may have something to do by itself; a wake-up ends it earlier."""
        deadline = self._core.next_deadline
        return self._next_rest if deadline is None else min(self._next_rest, max(0.001, deadline - time.monotonic()))

    def _turn(self, commands: list[m.Command]) -> None:
        events: list[m.Event] = []
        for command in commands:
            events += self._guarded(command)
        if not self._stopping:
            outputs = self._core.step()
            if outputs:
                events.append(_as_event(outputs))
        while self._late:
            events.append(self._late.popleft())
        self.turns += 1
        if events:
            self._emit(events)

    def _guarded(self, command: m.Command) -> list[m.Event]:
        """What goes wrong with one command is told to its sender alone; the requests that run are not its business."""
        try:
            return self._carry_out(command)
        except Exception as error:
            if not isinstance(error, SgliteError):
                log.exception("%s could not be carried out", type(command).__name__)
            return _refusal(command, ErrorInfo.of(error))

    def _carry_out(self, command: m.Command) -> list[m.Event]:
        match command:
            case m.Generate(request) | m.Score(request):
                self._core.add(request)
            case m.Abort(request_id):
                self._core.abort(request_id)
            case m.Release(request_id):
                self._core.release(request_id)
            case m.EndProgram(program_id):
                self._core.end_program(program_id)
            case m.WarmPrefix(request_id, token_ids, namespace, lease_s):
                self._core.warm_prefix(request_id, token_ids, namespace=namespace, lease_s=lease_s)
            case m.CompileGrammar():
                self._compile(command)
            case m.FlushCache(call_id):
                return [m.Reply(call_id, self._core.flush_cache())]
            case m.Stats(call_id):
                return [m.Reply(call_id, self._stats())]
            case m.Stop():
                self._stopping = True
        return []

    def _compile(self, command: m.CompileGrammar) -> None:
        if self._grammars is None:
            error = SgliteError("this engine has no grammar compiler")
            self._late.append(m.Reply(command.call_id, error=ErrorInfo.of(error)))
            return

        def done(future: Future[CompiledGrammar]) -> None:
            failure = future.exception()
            if failure is None:
                reply = m.Reply(command.call_id, msgspec.to_builtins(future.result().coverage))
            else:
                reply = m.Reply(command.call_id, error=ErrorInfo.of(failure))
            self._late.append(reply)
            self._inbox.wake()

        self._grammars.compile(command.spec).add_done_callback(done)


def _refusal(command: m.Command, error: ErrorInfo) -> list[m.Event]:
    match command:
        case m.Generate(request) | m.Score(request):
            return [m.Refused(request.request_id, error)]
        case m.WarmPrefix(request_id):
            return [m.Refused(request_id, error)]
        case m.CompileGrammar(call_id) | m.FlushCache(call_id) | m.Stats(call_id):
            return [m.Reply(call_id, error=error)]
    return []


def _as_event(outputs: list[RequestOutput | ScoreOutput]) -> m.Outputs:
    generated = tuple(o for o in outputs if isinstance(o, RequestOutput))
    if len(generated) == len(outputs):
        return m.Outputs(generated)
    return m.Outputs(generated, tuple(o for o in outputs if isinstance(o, ScoreOutput)))
