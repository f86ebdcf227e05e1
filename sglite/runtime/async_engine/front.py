"""The callers' side of an engine, without the engine: who waits for what, and what an event means for them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from sglite.errors import EngineDead, SgliteError
from sglite.protocol import ErrorInfo
from sglite.runtime.async_engine import messages as m
from sglite.runtime.async_engine.courtesy import Courtesy
from sglite.runtime.async_engine.delivery import Mailboxes, Router


class Front:
    """Requests by id and calls by number. Safe to use from any thread."""

    def __init__(self) -> None:
        self.router = Router()
        self.mailboxes = Mailboxes()
        self.courtesy = Courtesy()  # towards a loop on a thread of this process; one elsewhere is in nobody's way
        self.on_progress: Callable[[str], None] | None = None
        self._calls: dict[int, Future[Any]] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def new_call(self) -> tuple[int, Future[Any]]:
        """A number for a command and the future of its reply. Raises the failure of an engine that has failed."""
        future: Future[Any] = Future()
        with self._lock:
            failure = self.router.failure
            if failure is not None:
                raise failure
            number = next(self._numbers)
            self._calls[number] = future
        return number, future

    def handle(self, events: list[m.Event]) -> list[m.Command]:
        """Hand events to those who wait. Returns aborts for requests whose reader has gone."""
        gone: list[str] = []
        for event in events:
            match event:
                case m.Outputs(generated, scored):
                    gone += self.router.deliver(generated)
                    gone += self.router.deliver(scored)
                case m.Refused(request_id, error):
                    self.router.refuse(request_id, error.to_exception())
                case m.Reply():
                    self._reply(event)
                case m.Progress(text):
                    self.progress(text)
                case m.Died(error):
                    self.fail(error.to_exception())
                case m.Ready() | m.Heartbeat():
                    pass
        return [m.Abort(request_id) for request_id in gone]

    def progress(self, text: str) -> None:
        if self.on_progress is not None:
            self.on_progress(text)

    def fail(self, error: SgliteError) -> None:
        """Everybody who waits gets this error now; everybody who comes later too, until revive()."""
        self.router.fail(error)
        with self._lock:
            calls = list(self._calls.values())
            self._calls.clear()
        for future in calls:
            if future.set_running_or_notify_cancel():
                future.set_exception(ErrorInfo.of(error).to_exception())  # each waiter raises its own

    def revive(self) -> None:
        self.router.revive()

    def _reply(self, reply: m.Reply) -> None:
        with self._lock:
            future = self._calls.pop(reply.call_id, None)
        if future is None or not future.set_running_or_notify_cancel():
            return
        if reply.error is not None:
            future.set_exception(reply.error.to_exception())
        else:
            future.set_result(reply.value)


def closed() -> EngineDead:
    return EngineDead("the engine is closed")
