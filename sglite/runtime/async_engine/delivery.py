"""From the step loop to whoever waits: any number of event loops and threads at once.

    loop turn -> Router.deliver(outputs) -> one mailbox per event loop -> one call_soon_threadsafe per turn
                                         -> one queue per waiting thread

The thread that delivers never runs a reader's code. A reader that has gone (closed event loop) is dropped and
reported back, so that its request is aborted.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakKeyDictionary, ref

from sglite.errors import InvalidRequest, SgliteError
from sglite.protocol import ErrorInfo, FinishReason, RequestOutput, ScoreOutput

Item = RequestOutput | ScoreOutput


class Sink(Protocol):
    """Where the outputs of one or several requests go. `put` and `flush` are called by the delivering thread only."""

    def put(self, item: Item) -> None: ...

    def flush(self) -> bool:
        """Wake the reader, once per turn. False: it is gone for good."""
        ...


class ThreadSink:
    """The outputs of any number of requests, read by one blocked thread."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[Item] = queue.SimpleQueue()

    def put(self, item: Item) -> None:
        self._items.put(item)

    def flush(self) -> bool:
        return True

    def get(self, timeout: float | None = None) -> Item:
        """Blocks; a signal handler of the main thread (Ctrl-C) may raise out of it. Raises queue.Empty."""
        return self._items.get(timeout=timeout)


class Mailbox:
    """All that goes to one event loop: filled by the delivering thread, emptied by the loop in one callback."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = ref(loop)  # the registry maps loop -> mailbox weakly: a strong reference here would keep both
        self._items: deque[tuple[LoopSink, Item]] = deque()
        self._scheduled = False

    def put(self, sink: LoopSink, item: Item) -> None:
        self._items.append((sink, item))

    def flush(self) -> bool:
        loop = self._loop()
        if loop is None or loop.is_closed():
            return False
        if self._scheduled or not self._items:
            return True
        self._scheduled = True
        try:
            loop.call_soon_threadsafe(self._empty)
        except RuntimeError:  # the event loop was closed between two turns
            return False
        return True

    def _empty(self) -> None:
        # Cleared before the first pop: an item appended after the last pop schedules a new call.
        self._scheduled = False
        while self._items:
            sink, item = self._items.popleft()
            sink.feed(item)


class LoopSink:
    """The outputs of one request, read by one coroutine."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._items: deque[Item] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: Item) -> None:
        self._mailbox.put(self, item)

    def flush(self) -> bool:
        return self._mailbox.flush()

    def feed(self, item: Item) -> None:
        """On the event loop's thread."""
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> Item:
        while not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._items.popleft()


class Mailboxes:
    """One Mailbox for each event loop that has asked for something."""

    def __init__(self) -> None:
        self._by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, Mailbox] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def sink(self) -> LoopSink:
        """A sink of the running event loop."""
        loop = asyncio.get_running_loop()
        with self._lock:
            mailbox = self._by_loop.get(loop)
            if mailbox is None:
                mailbox = self._by_loop[loop] = Mailbox(loop)
        return LoopSink(mailbox)


ABANDONED_S = 30.0  # after which an id is free although its last output has not come


@dataclass(slots=True)
class _Entry:
    """`sink` None: nobody reads any more, but outputs of this request may still be on their way. Its id stays in use,
    or a new request with it would be given them."""

    sink: Sink | None
    unfinished: int  # completions that have not ended yet
    abandoned: float = 0.0  # time.monotonic() seconds

    @property
    def over(self) -> bool:
        return self.sink is None and time.monotonic() - self.abandoned > ABANDONED_S


class Router:
    """Which sink each unfinished request belongs to. Safe to use from any thread."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._abandoned: deque[str] = deque()  # ids in the order in which they were given up
        self._lock = threading.Lock()
        self._failure: ErrorInfo | None = None

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def failure(self) -> SgliteError | None:
        """Why nothing can be registered any more. A new exception each time: one that is raised again and again keeps
        the tracebacks of all."""
        return None if self._failure is None else self._failure.to_exception()

    def register(self, request_id: str, sink: Sink, *, completions: int = 1) -> None:
        """Raises InvalidRequest for an id in use, and the failure of a router that has failed."""
        with self._lock:
            failure = self.failure
            if failure is not None:
                raise failure
            known = self._entries.get(request_id)
            if known is not None and not known.over:
                raise InvalidRequest(f"request id {request_id!r} is already in use", param="request_id")
            self._entries[request_id] = _Entry(sink, completions)

    def forget(self, request_id: str, sink: Sink) -> bool:
        """The sink waits for it no more. Returns whether it was unfinished, so that its end has to be seen to."""
        with self._lock:
            entry = self._entries.get(request_id)
            if entry is None or entry.sink is not sink:
                return False
            entry.sink, entry.abandoned = None, time.monotonic()
            self._abandoned.append(request_id)
            while self._abandoned:  # the oldest, where the engine never said that they ended
                oldest = self._entries.get(self._abandoned[0])
                if oldest is not None and oldest.sink is None and not oldest.over:
                    break
                if oldest is not None and oldest.over:
                    del self._entries[self._abandoned[0]]
                self._abandoned.popleft()
            return True

    def deliver(self, outputs: Iterable[RequestOutput | ScoreOutput]) -> list[str]:
        """Hand the outputs of one turn over. Returns the ids of unfinished requests whose reader is gone."""
        touched: dict[Sink, str] = {}
        for output in outputs:
            entry = self._entries.get(output.request_id)
            if entry is None:
                continue
            sink = entry.sink  # once: another thread may give it up meanwhile
            if sink is not None:
                sink.put(output)
                touched[sink] = output.request_id
            if isinstance(output, ScoreOutput) or output.finished:
                entry.unfinished -= 1
                if entry.unfinished <= 0:
                    self._entries.pop(output.request_id, None)
        gone = [(request_id, sink) for sink, request_id in touched.items() if not sink.flush()]
        return [request_id for request_id, sink in gone if self.forget(request_id, sink)]

    def refuse(self, request_id: str, error: SgliteError) -> None:
        """End one request with this error."""
        entry = self._entries.pop(request_id, None)
        if entry is not None and entry.sink is not None:
            entry.sink.put(_failed(request_id, error))
            entry.sink.flush()

    def fail(self, error: SgliteError) -> None:
        """End every unfinished request with this error, and refuse new ones with it."""
        with self._lock:
            self._failure = ErrorInfo.of(error)
            entries = list(self._entries.items())
            self._entries.clear()
            self._abandoned.clear()
        for request_id, entry in entries:
            if entry.sink is not None:
                entry.sink.put(_failed(request_id, error))
                entry.sink.flush()

    def revive(self) -> None:
        """Take requests again, after a restart of what answers them."""
        with self._lock:
            self._failure = None


def _failed(request_id: str, error: SgliteError) -> RequestOutput:
    return RequestOutput(request_id=request_id, finish_reason=FinishReason.ERROR, error=ErrorInfo.of(error))
