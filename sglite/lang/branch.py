"""One state of a running program: a queue of operations, carried out in order by one task, and the variables.

The program's code appends operations and goes on; the task carries them out on the program loop. A variable is bound
when its operation is appended, to a slot that the operation fills: a read finds the slot by name and waits for it. So
reads see the program's order whatever has been carried out, and a fork sees what its parent had bound.

    program's code                          program loop
    append(Gen "x")  -> slot x, queue --->  task: prompt -> client -> transcript, slot x filled
    read("x")        -> wait(slot x) <----
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from sglite.errors import ProgramError, ProgramSyntaxError, RequestAborted
from sglite.lang.bridge import until_done, wait
from sglite.lang.habits import Follows
from sglite.lang.items import Concatenate, Fork, Held, Item, Outcome, Said, Slot, Snapshot, names_set, told
from sglite.lang.nodes import (
    Gen,
    Node,
    RoleBegin,
    RoleEnd,
    ScopeBegin,
    ScopeEnd,
    Select,
    Text,
    flatten,
)
from sglite.lang.outlook import Outlook, Place
from sglite.lang.scopes import OpenScopes
from sglite.lang.session import Session
from sglite.lang.streaming import iterate, iterate_async, text_pieces, variable_pieces, variable_texts
from sglite.lang.timeline import Timeline
from sglite.lang.transcript import Mark, Transcript, text_since
from sglite.protocol import Usage

if TYPE_CHECKING:
    from sglite.lang.early import Early

# Carried out only together with an operation that needs them: nobody sees text that nobody reads.
_LAZY = (Text, RoleBegin, RoleEnd, ScopeBegin)

LOOK_AHEAD = 128  # operations, behind the one that is carried out

_BETWEEN = (*_LAZY, ScopeEnd, Snapshot)

CarryOut = Callable[["Branch", Item], Coroutine[Any, Any, None]]


class Branch:
    def __init__(self, session: Session, carry_out: CarryOut, *, parent: Branch | None = None) -> None:
        self.session = session
        self.slots: dict[str, Slot] = {} if parent is None else dict(parent.slots)
        self.assigned: dict[str, None] = {}  # names bound since the fork, in order
        self.failed: ProgramError | None = None
        self._carry_out = carry_out
        self._lock = threading.Lock()
        self._queue: deque[Item] = deque()
        self._task: asyncio.Task[None] | None = None
        self._current: Item | None = None
        self._running = False
        self.number = session.next_branch()
        self._seeded = parent is None
        self._joined = False  # and nothing was appended since
        timeline = session.timeline
        self.lane = 0 if timeline is None else timeline.new_lane(None if parent is None else parent.lane)
        self._scopes = OpenScopes() if parent is None else parent._scopes.for_fork()
        # From here on: touched by the task alone.
        self.transcript: Transcript = session.new_transcript()
        self.chat: list[dict[str, Any]] = []
        self.role: str | None = None
        self.role_mark: Mark | None = None
        self.scopes: dict[str, list[Mark]] = {}  # open ones; of a name inside itself, the outer first
        self.fork_mark: Mark = self.transcript.mark()
        self.fork_messages = 0  # complete ones at the fork
        self.written: dict[str, Outcome] = {}  # by the generations carried out so far
        self.last_meta: dict[str, Any] = {}  # of the call carried out last, for the timeline
        self.last_request_id: str | None = None
        self.calls = 0  # made so far, with the one that is being made
        self.held: Held | None = None  # the row that the next generation continues
        self.leader: tuple[int, ...] = ()  # ids that the last call read and wrote, where that was a generation
        self.early: Early | None = None  # the next call, if it was sent already
        self.promised: dict[int, Early] = {}  # of forks that are likely to come: their first calls, by their numbers
        self.follows = Follows()  # what it has done behind its last call
        self.siblings = 1  # how many forks make their first call together with this one
        self._watchers: list[asyncio.Future[None]] = []

    # ---- the program's side: any thread -------------------------------------------------------------------------

    def append(self, node: Node) -> None:
        """Raises ProgramSyntaxError for what cannot stand here, and the state's error if it has failed."""
        nodes = flatten(node)
        self._scopes.check(nodes)
        items = [Item(n, self.session.next_step(), {name: Slot() for name in names_set(n)}) for n in nodes]
        if self.session.returned.done():
            raise ProgramSyntaxError("the program has ended; nothing can be appended to its state any more")
        if not items:
            return
        self._joined = False
        self._enqueue(items)
        for item in items:
            for name, slot in item.slots.items():
                self._bind(name, slot)

    def append_at(self, node: Node, step: int) -> Slot | None:
        """One operation with the number that it has in a program's graph; the slot of its variable. Raises
        ProgramSyntaxError for what cannot stand here."""
        self._scopes.check([node])
        item = Item(node, step, {name: Slot() for name in names_set(node)})
        self._enqueue([item])
        for name, slot in item.slots.items():
            self._bind(name, slot)
        return next(iter(item.slots.values()), None)

    def read(self, name: str) -> Any:
        return self._outcome(name).value

    def raw(self, name: str) -> Any:
        return self._outcome(name).raw

    def meta(self, name: str) -> Any:
        """None where the variable was not made by the model."""
        return told(self._outcome(name).meta) if name in self.slots else None

    def slot(self, name: str) -> Slot:
        slot = self.slots.get(name)
        if slot is None:
            known = ", ".join(self.slots) or "none"
            raise KeyError(f"the program has not set {name!r} (set so far: {known})")
        return slot

    def assign(self, name: str, value: Any, *, raw: Any = None, meta: Any = None) -> None:
        slot = Slot()
        slot.future.set_result(Outcome(value, value if raw is None else raw, meta))
        self._bind(name, slot)

    def fork(self, size: int) -> list[Branch]:
        children = [Branch(self.session, self._carry_out, parent=self) for _ in range(size)]
        self._enqueue([Item(Fork(tuple(children)), self.session.next_step(), {})])
        return children

    def gather(self, children: Sequence[Branch], *, on_error: str, scalar: bool = False) -> None:
        """Wait for the children and bind what they bound: a list with one entry a child, in order (None where a child
        has no such variable); with `scalar` the one child's own values."""
        self.await_all(children, cancel=on_error == "raise", wanted=False)
        for name in dict.fromkeys(name for child in children for name in child.assigned):
            found = [child._entry(name) for child in children]
            if scalar:
                self.assign(name, found[0].value, raw=found[0].raw, meta=found[0].meta)
            else:
                self.assign(name, [f.value for f in found], raw=[f.raw for f in found], meta=[f.meta for f in found])

    def concatenate(self, children: Sequence[Branch]) -> None:
        said = self.await_all(children, cancel=True)
        self._enqueue([Item(Concatenate(tuple(future.result() for future in said)), self.session.next_step(), {})])

    def await_all(self, children: Sequence[Branch], *, cancel: bool, wanted: bool = True) -> list[Future[Said]]:
        """Wait until all have carried out what they have. `cancel`: at the first failure stop the others and raise.
        `wanted`: what they have said by then."""
        done: Future[None] = Future()
        lock = threading.Lock()
        left = len(children)

        def one_done(future: Future[Any]) -> None:
            nonlocal left
            with lock:
                left -= 1
                if done.done():
                    return
                if cancel and future.exception() is not None:
                    done.set_exception(future.exception())
                elif left == 0:
                    done.set_result(None)

        said: list[Future[Said]] = []
        for child in children:
            child._joined = True
            said.append(child.snapshot(wanted=wanted))
            said[-1].add_done_callback(one_done)
        try:
            wait(done)
        except ProgramError:
            failed = next((c for c in children if c.failed is not None), None)
            for child in children:
                child.cancel("another fork of the same group failed")
                child.seen()
            if failed is not None:
                error = failed.failure()
                raise error from error.__cause__
            raise
        return said

    def snapshot(self, *, wanted: bool = True) -> Future[Said]:
        """What was said when everything appended so far is carried out. Not `wanted`: nothing, but then."""
        future: Future[Said] = Future()
        if not self._try_enqueue([Item(Snapshot(future, wanted), -1, {})]):
            future.set_exception(self.failed)
        return future

    @property
    def at_rest(self) -> bool:
        """It has nothing to carry out."""
        with self._lock:
            return not self._queue and not self._running

    async def read_async(self, name: str) -> Any:
        slot = self.slot(name)
        await until_done(slot.future)
        return self.read(name)

    def has(self, name: str) -> bool:
        return name in self.slots

    def sync(self) -> None:
        self._settled()

    def text(self) -> str:
        return self._settled().text

    def messages(self) -> list[dict[str, Any]]:
        return self._settled().messages

    def error(self) -> ProgramError | None:
        """Of this state, else what the program's function raised."""
        with contextlib.suppress(ProgramError):
            self._settled()
        if self.failed is not None:
            return self.failure()
        return self.session.error

    def can_append(self) -> bool:
        return self.failed is None and not self.session.returned.done()

    def usage(self) -> Usage:
        return self.session.usage

    def timeline(self) -> Timeline | None:
        return self.session.timeline

    def warmed_tokens(self) -> int:
        return self.session.warmed_tokens

    def text_iter(self, name: str | None) -> Iterator[str]:
        return iterate(text_pieces(self) if name is None else variable_texts(self, name))

    def text_async_iter(self, name: str | None, *, with_meta: bool) -> AsyncIterator[Any]:
        if name is None:
            return iterate_async(text_pieces(self))
        return iterate_async(variable_pieces(self, name) if with_meta else variable_texts(self, name))

    def _settled(self) -> Said:
        future = self.snapshot()
        try:
            return wait(future)
        except ProgramError:
            if self.failed is not None:
                error = self.failure()
                raise error from error.__cause__
            raise

    def failure(self) -> ProgramError:
        """The state's error, made anew: several threads may raise it. For a state that was stopped because its
        program failed, what the program failed with."""
        found = self.failed
        assert found is not None
        if isinstance(found.__cause__, RequestAborted) and self.session.error is not None:
            found = self.session.error
        made = ProgramError(found.message, program=found.program, step=found.step, variable=found.variable)
        made.status, made.run = found.status, found.run
        made.__cause__ = found.__cause__
        self.seen()
        return made

    def seen(self) -> None:
        """Somebody has got the error: the end of the run need not raise it again."""
        with self.session.lock:
            if self in self.session.failed:
                self.session.failed.remove(self)

    def cancel(self, reason: str) -> None:
        """Stop at once: a request in flight is aborted, and reads raise. A no-op for a state with nothing to do."""
        with self._lock:
            if not self._queue and not self._running and self._seeded:
                return
        self.session.posts.post(self._cancel, reason)

    def _outcome(self, name: str) -> Outcome:
        slot = self.slot(name)
        timeline = self.session.timeline
        try:
            if timeline is None or slot.future.done():
                found = wait(slot.future)
                if asyncio._get_running_loop() is None:  # somebody's event loop has other things to do
                    self.session.after_you()
                return found
            with timeline.waiting(name, self.lane):
                return wait(slot.future)
        except ProgramError:
            if self.failed is not None:
                error = self.failure()
                raise error from error.__cause__
            raise

    def _entry(self, name: str) -> Outcome:
        if self.failed is not None:
            error = self.failure()
            return Outcome(error, error)
        if name not in self.slots:
            return Outcome(None, None)
        return wait(self.slots[name].future)

    def _bind(self, name: str, slot: Slot) -> None:
        self.slots[name] = slot
        self.assigned[name] = None
        if self._watchers:
            self.session.posts.post(self.notify)

    def _enqueue(self, items: Sequence[Item]) -> None:
        if self.session.cancelled is not None:
            if self.session.error is not None:  # what the cancelling came of
                raise self.session.error from self.session.error.__cause__
            raise self.session.wrap(RequestAborted(self.session.cancelled))
        if not self._try_enqueue(items):
            error = self.failure()
            raise error from error.__cause__

    def _try_enqueue(self, items: Sequence[Item]) -> bool:
        """False: the state has failed."""
        with self._lock:
            if self.failed is not None:
                return False
            self._queue.extend(items)
            needed = self.session.stream or not all(isinstance(item.node, _LAZY) for item in items)
            start = self._seeded and not self._running and needed
            if start:
                self._running = True
        if start:
            cancelled = self._become_busy()
            self.session.posts.post(self._start)
            if cancelled is not None and not isinstance(items[0].node, Snapshot):
                self.session.posts.post(self._cancel, cancelled)
        return True

    def _become_busy(self) -> str | None:
        """Why the session has been cancelled, if it has: from here on `Session.cancel` finds this state by itself."""
        with self.session.lock:
            self.session.busy.add(self)
            return self.session.cancelled

    # ---- the task's side: the program loop ------------------------------------------------------------------------

    def seed(self, parent: Branch, *, siblings: int) -> None:
        """Begin where the parent is now."""
        self.transcript = parent.transcript.fork()
        self.chat = list(parent.chat)
        self.role, self.role_mark = parent.role, parent.role_mark
        self.fork_mark, self.fork_messages = self.transcript.mark(), len(self.chat)
        self.last_request_id = parent.last_request_id
        self.leader = parent.leader
        self.siblings = siblings
        with self._lock:
            self._seeded = True
            start = bool(self._queue) and not self._running
            self._running = self._running or start
        if start:
            cancelled = self._become_busy()
            self._start()
            if cancelled is not None:
                self._cancel(cancelled)

    def show(self, text: str) -> None:
        """Generated text, as it comes."""
        if text:
            self.transcript.pieces.append(text)
            self.notify()

    def notify(self) -> None:
        """Wake whoever streams from this state."""
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            if not watcher.done():
                watcher.set_result(None)

    async def changed(self) -> None:
        watcher = asyncio.get_running_loop().create_future()
        self._watchers.append(watcher)
        await watcher

    @property
    def has_queued(self) -> bool:
        return any(not isinstance(item.node, Snapshot) for item in self.queued())

    @property
    def place(self) -> Place:
        """Of the call that is being carried out."""
        return self.number, self.calls

    def outlook(self, name: str | None) -> Outlook:
        """What follows the call that is being carried out: from the compiled program's graph, else from what the
        program has appended already."""
        return self.outlook_at(self.place, name, [item.node for item in self.queued()])

    def queued(self) -> list[Item]:
        """What it has yet to carry out, as far as one looks ahead: a program may append thousands of operations."""
        with self._lock:
            return list(itertools.islice(self._queue, LOOK_AHEAD))

    def outlook_at(self, place: Place, name: str | None, queued: Sequence[Node]) -> Outlook:
        """`queued`: what has been appended behind the call at that place."""
        planned = self.session.plan.get(place)
        if planned is not None and planned.name == name:
            return planned
        calls = sum(isinstance(node, Gen | Select) for node in queued)
        following = next((node for node in queued if not isinstance(node, _BETWEEN)), None)
        if following is None:
            may_go_on = not self.rests
            return Outlook(name, calls, may_go_on, may_go_on)
        return Outlook(name, calls, True, isinstance(following, Gen | Select))

    @property
    def rests(self) -> bool:
        """Nothing is to be expected of it behind what it has. While the program's function runs it may append more, as
        agents do after each answer, but hardly to a state that it has joined."""
        return self._joined or self.session.returned.done()

    def said(self) -> Said:
        return Said(
            text="".join(self.transcript.pieces),
            messages=list(self.chat),
            text_since_fork=text_since(self.transcript, self.fork_mark),
            messages_since_fork=self.chat[self.fork_messages :],
        )

    def _start(self) -> None:
        self._task = self.session.loop.create_task(self._drain())

    async def _drain(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._running = False
                    self._task = None
                    break
                self._current = self._queue.popleft()
            self.session.after_you()
            try:
                await self._carry_out(self, self._current)
            except asyncio.CancelledError:
                self.fail(RequestAborted("cancelled"))
                return
            except Exception as error:  # noqa: BLE001 - whatever it is, it is this program's and reaches its caller
                self.fail(error)
                return
            self._current = None
            self.notify()
        with self.session.lock:
            if not self._running:
                self.session.busy.discard(self)
        self.notify()

    def fail(self, error: BaseException) -> None:
        """End the state with an error: what is queued is given up, and every wait for it raises. So do the forks that
        were to begin where it would have come."""
        if self.failed is not None:
            return
        item = self._current
        made = self.session.wrap(
            error, step=item.step if item else None, variable=next(iter(item.slots), None) if item else None
        )
        ending = self._end_with(made, tell=not isinstance(error, RequestAborted))
        while ending:  # forks of forks: as many as a program makes, more than calls can be nested
            child = ending.pop()
            if child.failed is None:
                ending += child._end_with(made, tell=False)

    def _end_with(self, made: ProgramError, *, tell: bool) -> list[Branch]:
        """Returns the forks that will not begin. `tell`: the end of the run raises it, unless somebody has seen it."""
        item, self._current = self._current, None
        with self._lock:
            self.failed = made
            given_up = [*([item] if item else []), *self._queue]
            self._queue.clear()
            self._running = False
            self._seeded = True
        with self.session.lock:
            self.session.busy.discard(self)
            if tell:
                self.session.failed.append(self)
        for early in (self.early, *self.promised.values()):
            if early is not None:
                self.session.early.discard(early)
                early.give_up()
        self.promised.clear()
        children: list[Branch] = []
        for gone in given_up:
            for slot in gone.slots.values():
                slot.future.set_exception(made)
            if isinstance(gone.node, Snapshot) and not gone.node.future.done():
                gone.node.future.set_exception(made)
            if isinstance(gone.node, Fork):
                children += gone.node.children
        self.notify()
        return children

    def _cancel(self, reason: str) -> None:
        task = self._task
        self.fail(RequestAborted(reason))
        if task is not None:
            task.cancel()
