"""From callers to the step loop: what an event loop asks within one of its turns goes in one piece.

So requests that many tasks make at the same moment enter the same step; one by one, the first of them would begin a
step alone, and the others wait for its end.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from weakref import ref

from sglite.runtime.async_engine import messages as m


class Outbox:
    """Commands leave in the order in which they came. Safe to use from any thread."""

    def __init__(self, send: Callable[[list[m.Command]], None]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._commands: list[m.Command] = []
        self._due: ref[asyncio.AbstractEventLoop] | None = None  # the loop in whose next turn they leave

    def send(self, commands: list[m.Command]) -> None:
        """At once, with all that waits."""
        with self._lock:
            self._commands += commands
            self._flush()

    def post(self, commands: list[m.Command]) -> None:
        """In the next turn of the calling event loop; at once where there is none."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self.send(commands)
            return
        with self._lock:
            self._commands += commands
            due = None if self._due is None else self._due()
            if due is not loop:  # another one may never have its next turn
                self._due = ref(loop)
                loop.call_soon(self._leave)

    def _leave(self) -> None:
        with self._lock:
            self._flush()

    def _flush(self) -> None:
        commands, self._commands, self._due = self._commands, [], None
        if commands:
            self._send(commands)
