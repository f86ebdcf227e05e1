"""Calls of a batch that belong together reach the engine together.

When a step of the engine ends, the programs that it answered go on at the same time, and their next calls are made one
after the other, within some milliseconds. An engine that begins with the first of them makes the others wait for a
step of its own.
"""

from __future__ import annotations

import asyncio

from sglite.lang.bridge import worker_pool

MOST_S = 0.003  # that a call waits for others
MOST_AT_FIRST_S = 0.012  # while no call of the batch was made: nothing of it runs that could use the time
_QUIET_TURNS = 6  # of the event loop: from a function's operation to its call it takes some


class Together:
    """One a batch. All methods are called on the program loop."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []
        self._until = 0.0
        self._most_s = MOST_AT_FIRST_S
        self.starting = 0  # programs that the batch is about to start; written under its lock

    async def with_others(self) -> None:
        """Returns, for all who wait, once no function of a program is at work that may make another call, and the
        event loop brought none in its last turns."""
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self._waiting.append(future)
        if len(self._waiting) == 1:
            self._until = loop.time() + self._most_s
            self._most_s = MOST_S
            loop.call_soon(self._look, loop, 0, _QUIET_TURNS)
        await future

    def _look(self, loop: asyncio.AbstractEventLoop, seen: int, turns: int) -> None:
        """Each turn of the loop lets the functions' threads run."""
        coming = self.starting or worker_pool().at_work or len(self._waiting) > seen
        turns = _QUIET_TURNS if coming else turns - 1
        if turns and loop.time() < self._until:
            loop.call_soon(self._look, loop, len(self._waiting), turns)
            return
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)
