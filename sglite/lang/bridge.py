"""Between plain synchronous programs and the event loop: who waits where.

    caller's thread        run(): the program's function runs here; a read blocks the thread
    worker threads (<= 32) run_batch() and stream=True: many functions a thread, each in a greenlet; a read gives the
                           thread to the next function, so a thousand programs need no thousand threads. Functions
                           that are known to block nowhere share one thread: many would only fight over the
                           interpreter lock, and with the engine's. Functions that wait inside a `with` block of
                           theirs have a thread each, since they may hold a lock (holding.py)
    coroutine              async def: a read inside it (`s["x"]`) gives the event loop to the other tasks
    program loop           one thread with the event loop on which all operations are carried out

A function that blocks in a tool (time.sleep, requests) holds its worker; the operations of all programs go on, and new
functions start on other workers. All waiting is on `concurrent.futures.Future`s, which any thread may complete.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import contextvars
import itertools
import os
import queue
import sys
import threading
import time
import types
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from concurrent import futures
from concurrent.futures import Future
from typing import Any, Generic, Protocol, TypeVar

import greenlet

from sglite.errors import ProgramSyntaxError
from sglite.lang.holding import open_blocks

T = TypeVar("T")
MAX_WORKERS = 32
IDLE_S = 5.0  # a worker without a program ends after that long
SLOW_S = 0.01  # a function that kept its thread for that long between two reads blocks, or may
RUNS_AFTER_SLOW = 8  # without that, and it counts as quick again
MOST_PAUSE_S = 0.002  # that operations wait for functions
EXIT_S = 1.0  # how long interpreter exit waits for a thread that is busy in a program's code


def wait(future: Future[T]) -> T:
    """The future's result, by whatever way of waiting fits the place of the call."""
    if not future.done():
        current = greenlet.getcurrent()
        if isinstance(current, _Function):
            current.wait(future)
        elif isinstance(current, _Step):
            current.give_back(future)
        elif getattr(_thread, "is_program_loop", False):
            raise ProgramSyntaxError(
                "this read would stop the event loop: in a task that the program started itself, "
                "use `await s.get_async(name)` instead of `s[name]`"
            )
    return future.result()


_thread = threading.local()
# is_program_loop, posts: set once by each loop thread. excused: seconds that a thread has spent in waking loops


class Posts:
    """What other threads want done on an event loop, in order. One wake-up does for all that comes before the loop
    turns: each is a system call that gives the interpreter lock away, and getting it back takes milliseconds."""

    def __init__(self, loop: asyncio.AbstractEventLoop, pause: Callable[[], object] | None = None) -> None:
        """`pause`: called on the loop before what was posted is done."""
        self._loop = loop
        self._pause = pause
        self._callbacks: deque[tuple[Callable[..., object], tuple[Any, ...], contextvars.Context]] = deque()
        self._waking = False

    def post(self, callback: Callable[..., object], *args: Any) -> None:
        self._callbacks.append((callback, args, contextvars.copy_context()))
        if not self._waking:
            self._waking = True
            began = time.monotonic()
            self._loop.call_soon_threadsafe(self._hand_over)
            _thread.excused = getattr(_thread, "excused", 0.0) + time.monotonic() - began

    def _hand_over(self) -> None:
        if self._pause is not None:
            self._pause()
        self._waking = False  # before the first is taken: one that comes after the last was taken wakes the loop again
        while self._callbacks:
            callback, args, context = self._callbacks.popleft()
            try:
                context.run(callback, *args)
            except Exception as error:  # noqa: BLE001 - what an event loop does with its callbacks
                self._loop.call_exception_handler({"message": f"{callback} failed", "exception": error})


class LoopThread:
    """An event loop on a daemon thread of its own, ended at interpreter exit."""

    def __init__(self, name: str, pause: Callable[[], object] | None = None) -> None:
        self.loop = asyncio.new_event_loop()
        self.posts = Posts(self.loop, pause)
        self._tasks: set[asyncio.Task[Any]] = set()  # the loop itself would let them be collected
        self._closed = False
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def _main(self) -> None:
        _thread.is_program_loop = True
        _thread.posts = self.posts
        asyncio.set_event_loop(self.loop)
        while not self._closed:
            # asyncio lets these two out of a task that a program started itself: they end that task, not the loop.
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                self.loop.run_forever()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """SystemExit and KeyboardInterrupt go on in whoever waits, as any error does."""
        outcome: Future[T] = Future()
        task = asyncio.run_coroutine_threadsafe(_contained(coroutine), self.loop)

        def ended(task: Future[tuple[T | None, BaseException | None]]) -> None:
            if task.cancelled():
                outcome.cancel()
            if not outcome.set_running_or_notify_cancel():
                return
            error = task.exception()
            result: Any = None
            if error is None:
                result, error = task.result()
            if error is None:
                outcome.set_result(result)
            else:
                outcome.set_exception(error)

        outcome.add_done_callback(lambda outcome: task.cancel() if outcome.cancelled() else None)
        task.add_done_callback(ended)
        return outcome

    def begin(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Nobody waits for it, nor for its error."""
        self.posts.post(self._begin, coroutine)

    def _begin(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        task = self.loop.create_task(_contained(coroutine))
        self._tasks.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Wait for it; an interrupt (Ctrl-C) cancels it."""
        future = self.submit(coroutine)
        try:
            return wait(future)
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        with contextlib.suppress(TimeoutError):
            self.submit(_cancel_others()).result(EXIT_S)
        self._closed = True
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(EXIT_S)


async def _contained(coroutine: Coroutine[Any, Any, T]) -> tuple[T | None, BaseException | None]:
    """Its result or its error: some would end the event loop if a task raised them, and a task complains of any that
    nobody has asked it for."""
    try:
        return await coroutine, None
    except (asyncio.CancelledError, GeneratorExit):
        raise
    except BaseException as error:  # noqa: BLE001 - goes on in whoever waits
        return None, error


async def _cancel_others() -> None:
    """So that requests in flight are aborted and nothing is left pending."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class _Closable(Protocol):
    def close(self) -> None: ...


C = TypeVar("C", bound=_Closable)


class _Lazy(Generic[C]):
    """A thing made at its first use, once, whichever thread comes first; closed at interpreter exit.

    Greenlets live on threads of their own: if the interpreter killed such a thread at its exit, the C stack would be
    unwound in the middle of a switch. So exit stops them in order.
    """

    def __init__(self, make: Callable[[], C]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._made: C | None = None

    def __call__(self) -> C:
        with self._lock:
            if self._made is None:
                self._made = self._make()
                atexit.register(self._made.close)
            return self._made

    def forget(self) -> None:
        """In a child process after a fork: the threads are the parent's, and a lock may have been held just then."""
        made, self._made = self._made, None
        self._lock = threading.Lock()
        if made is not None:
            atexit.unregister(made.close)


program_loop = _Lazy(lambda: LoopThread("sglite-programs", lambda: worker_pool().let_finish()))
"""Carries out all operations."""

coroutine_loop = _Lazy(lambda: LoopThread("sglite-coroutines"))
"""Runs `async def` programs that are started from synchronous code; a blocking one stops only its like."""


# ---- synchronous functions: greenlets on workers ---------------------------------------------------------------


class _Function(greenlet.greenlet):
    """One synchronous function on a worker. Only the worker's own thread refers to it: others know its number."""

    def __init__(self, worker: _Worker, number: int, job: _Job) -> None:
        super().__init__(job.run)
        self.gr_context = job.context
        self.pace = job.pace
        self.scopes = 0  # `with` blocks of states (`with s.user():`) that it is in
        self._worker = worker
        self._number = number

    def wait(self, future: Future[Any]) -> None:
        worker, number = self._worker, self._number
        if open_blocks(sys._getframe(1), _Job.run.__code__) > self.scopes:
            self.pace.holds = True
            worker.hold(future)
            return
        future.add_done_callback(lambda _: worker.resume(number))
        assert self.parent is not None
        with _event_loop_put_aside():
            self.parent.switch()


def _event_loop_put_aside() -> contextlib.AbstractContextManager[None]:
    """A function may run an event loop of its own (asyncio.run). While a read inside that waits, the functions that
    have the thread meanwhile are in no loop, and may run their own."""
    loop = asyncio._get_running_loop()
    return _NOTHING if loop is None else _put_aside(loop)


_NOTHING = contextlib.nullcontext()


@contextlib.contextmanager
def _put_aside(loop: asyncio.AbstractEventLoop) -> Generator[None]:
    task, hooks = asyncio.current_task(loop), sys.get_asyncgen_hooks()
    if task is not None:
        asyncio.tasks._leave_task(loop, task)
    asyncio._set_running_loop(None)
    sys.set_asyncgen_hooks(None, None)
    try:
        yield
    finally:
        sys.set_asyncgen_hooks(*hooks)
        asyncio._set_running_loop(loop)
        if task is not None:
            asyncio.tasks._enter_task(loop, task)


@contextlib.contextmanager
def state_scope() -> Generator[None]:
    """Around the body of a state's own `with` block, in which nothing is held."""
    current = greenlet.getcurrent()
    function = current if isinstance(current, _Function) else None
    if function is not None:
        function.scopes += 1
    try:
        yield
    finally:
        if function is not None:
            function.scopes -= 1


class Pace:
    """Whether a program's function gives its thread back quickly, by what its runs have shown. A new one is not trusted
    to: tools may block. `holds`: it has waited where it may hold a lock, so it shares its thread with no other."""

    def __init__(self) -> None:
        self._runs_to_go = 1
        self.holds = False

    @property
    def quick(self) -> bool:
        return self._runs_to_go <= 0 and not self.holds

    def kept(self, seconds: float) -> None:
        """It had its thread for that long."""
        if seconds > SLOW_S:
            self._runs_to_go = RUNS_AFTER_SLOW

    def ended(self) -> None:
        self._runs_to_go -= self._runs_to_go > 0


class _Worker:
    """A thread that switches between the functions it has begun. Greenlets cannot move to another thread."""

    def __init__(self, pool: WorkerPool, first: _Job) -> None:
        self._pool = pool
        self._since: float | None = None  # when the function that has the thread was given it
        self.held = False  # that one waits with it; written under the pool's lock
        self.rests = threading.Event()  # it has nothing to do
        # A job to begin, the number of a function to resume, or None to end. Putting takes no lock of ours: the
        # program loop resumes thousands of functions a second.
        self.ready: queue.SimpleQueue[_Job | int | None] = queue.SimpleQueue()
        self.ready.put(first)
        self._functions: dict[int, _Function] = {}
        self._numbers = itertools.count()
        self.thread = threading.Thread(target=self._main, name="sglite-worker", daemon=True)
        self.thread.start()

    def resume(self, number: int) -> None:
        self.ready.put(number)

    def _main(self) -> None:
        while (item := self._next()) is not None:
            if isinstance(item, int):
                number = item
            else:
                number = next(self._numbers)
                self._functions[number] = _Function(self, number, item)
            self._switch_to(number)
        self._functions.clear()  # on this thread, where greenlets must end

    def _switch_to(self, number: int) -> None:
        function = self._functions[number]
        _thread.excused = 0.0
        self._since = began = time.monotonic()
        function.switch()
        self._since = None
        function.pace.kept(time.monotonic() - began - _thread.excused)
        if function.dead:
            function.pace.ended()
            del self._functions[number]

    def hold(self, future: Future[Any]) -> None:
        """Wait with the thread. What it was to begin next is begun elsewhere: that may be what is waited for."""
        began = time.monotonic()
        items: list[_Job | int | None] = []
        self._pool.hold(self)
        with contextlib.suppress(queue.Empty):
            while True:
                items.append(self.ready.get_nowait())
        for item in items:
            if isinstance(item, _Job):
                self._pool.put(item)
            else:
                self.ready.put(item)
        futures.wait((future,))
        self._pool.go_on(self)
        self._since = time.monotonic()
        _thread.excused = getattr(_thread, "excused", 0.0) + time.monotonic() - began

    @property
    def alone(self) -> bool:
        """It has a function that shares its thread with no other."""
        return any(function.pace.holds for function in self._functions.values())

    @property
    def has_functions(self) -> bool:
        return bool(self._functions)

    @property
    def stuck(self) -> bool:
        since = self._since
        return since is not None and time.monotonic() - since > SLOW_S

    @property
    def at_work(self) -> bool:
        return not self.held and not self.stuck and (self._since is not None or not self.ready.empty())

    def _next(self) -> _Job | int | None:
        with contextlib.suppress(queue.Empty):
            return self.ready.get_nowait()
        job = self._pool.take_or_idle(self)
        if job is not None:
            return job
        self.rests.set()
        while True:
            try:
                item = self.ready.get(timeout=None if self._functions else IDLE_S)
            except queue.Empty:
                if self._pool.retire(self):
                    return None
            else:
                self.rests.clear()
                self._pool.busy(self)
                return item


class _Job:
    def __init__(self, function: Callable[[], Any], pace: Pace) -> None:
        self._function = function
        self.pace = pace
        self.context = contextvars.copy_context()
        self.future: Future[Any] = Future()

    def run(self) -> None:
        try:
            result = self._function()
        except BaseException as error:  # noqa: BLE001 - goes on in whoever waits for the future
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


class WorkerPool:
    """Runs synchronous functions, any number at once, on few threads."""

    def __init__(self, max_workers: int = MAX_WORKERS) -> None:
        self._max_workers = max_workers
        self._lock = threading.Lock()
        self._workers: set[_Worker] = set()
        self._idle: set[_Worker] = set()  # wait for something to do
        self._shared: _Worker | None = None  # of the quick functions
        self._jobs: deque[_Job] = deque()  # wait for a worker
        self._closed = False

    def submit(self, function: Callable[[], T], pace: Pace | None = None) -> Future[T]:
        """`pace`: of its program, if it has one."""
        job = _Job(function, pace or Pace())
        self.put(job)
        return job.future

    def put(self, job: _Job) -> None:
        with self._lock:
            if job.pace.quick and self._share(job):
                return
            if job.pace.holds:
                found = next((worker for worker in self._idle if not worker.has_functions), None)
            else:
                found = next(iter(self._idle), None)
            if found is not None:
                self._idle.discard(found)
                found.ready.put(job)
            elif self._has_room or job.pace.holds:
                self._workers.add(_Worker(self, job))
            else:
                self._jobs.append(job)

    @property
    def _has_room(self) -> bool:
        """Those that wait with their thread take no place."""
        return sum(not worker.held for worker in self._workers) < self._max_workers

    def hold(self, worker: _Worker) -> None:
        """Its thread is not to be had until it goes on. A job that waits gets another one."""
        with self._lock:
            worker.held = True
            self._idle.discard(worker)
            if self._jobs and self._has_room:
                self._workers.add(_Worker(self, self._jobs.popleft()))

    def go_on(self, worker: _Worker) -> None:
        with self._lock:
            worker.held = False

    @property
    def at_work(self) -> bool:
        """A function has its thread, or is about to get it, and does not seem to block."""
        # No lock, which they would fight over: a copy is made in one piece.
        return bool(self._jobs) or any(worker.at_work for worker in tuple(self._workers))

    def let_finish(self) -> None:
        """Wait a moment while the quick functions that can go on do: what they ask for is then carried out together,
        and the two threads do not take the interpreter lock from each other at each operation."""
        shared = self._shared
        if shared is not None and shared.at_work:
            shared.rests.wait(MOST_PAUSE_S)

    def _share(self, job: _Job) -> bool:
        """Give it to the worker of the quick functions. False where that is held up, or there is no room for one."""
        if self._shared is not None and not self._shared.stuck and not self._shared.held:
            self._shared.ready.put(job)
        elif self._shared is None and self._has_room:
            self._shared = _Worker(self, job)
            self._workers.add(self._shared)
        else:
            return False
        return True

    def take_or_idle(self, worker: _Worker) -> _Job | None:
        """A job that waits; else the worker counts as idle until it is given one."""
        with self._lock:
            if worker is self._shared or worker.alone:
                return None
            if self._jobs and not self._closed:
                return self._jobs.popleft()
            self._idle.add(worker)
            return None

    def busy(self, worker: _Worker) -> None:
        """Its function may block from here on: no job is to wait for it."""
        with self._lock:
            self._idle.discard(worker)

    def retire(self, worker: _Worker) -> bool:
        """An idle worker may end. False when it was given a job at this moment."""
        with self._lock:
            if worker is self._shared and worker.ready.empty():
                self._shared = None
            elif worker not in self._idle:
                return False
            self._idle.discard(worker)
            self._workers.discard(worker)
            return True

    def close(self) -> None:
        """At interpreter exit: workers end, and what they had begun is given up."""
        with self._lock:
            self._closed = True
            workers = list(self._workers)
        for worker in workers:
            worker.ready.put(None)
        for worker in workers:
            worker.thread.join(EXIT_S)


worker_pool = _Lazy(WorkerPool)

if hasattr(os, "register_at_fork"):
    for _lazy in (program_loop, coroutine_loop, worker_pool):
        os.register_at_fork(after_in_child=_lazy.forget)


# ---- coroutines: each step in a greenlet, so that a read inside it can give the loop back --------------------------


class _Step(greenlet.greenlet):
    """Carries one coroutine."""

    def give_back(self, value: Any) -> Any:
        """To whoever drives it; returns what the driver sends."""
        assert self.parent is not None
        return self.parent.switch(value)


@types.coroutine
def drive(coroutine: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
    """Await `coroutine` so that `wait` inside it lets the event loop run."""

    def body() -> tuple[bool, Any]:
        sent: Any = None
        error: BaseException | None = None
        while True:
            try:
                wanted = coroutine.send(sent) if error is None else coroutine.throw(error)
            except StopIteration as stop:
                return True, stop.value
            sent, error = step.give_back((False, wanted))

    step = _Step(body)
    step.gr_context = greenlet.getcurrent().gr_context
    got = step.switch()
    while not step.dead:
        if isinstance(got, Future):
            try:
                yield from until_done(got).__await__()
            except BaseException as error:  # noqa: BLE001 - goes on inside the coroutine, as with any await
                got = step.throw(error)
            else:
                got = step.switch()
            continue
        try:
            sent = yield got[1]
        except BaseException as error:  # noqa: BLE001 - as above
            got = step.switch(None, error)
        else:
            got = step.switch(sent, None)
    return got[1]


async def until_done(future: Future[Any]) -> None:
    """Wait without taking the result and without cancelling the future (asyncio.wrap_future does)."""
    if future.done():
        return
    loop = asyncio.get_running_loop()
    event = asyncio.Event()
    posts: Posts | None = getattr(_thread, "posts", None)
    wake = loop.call_soon_threadsafe if posts is None else posts.post

    def done(_: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # whoever waited has gone, and its loop is closed
            wake(event.set)

    future.add_done_callback(done)
    await event.wait()


async def wait_async(future: Future[T]) -> T:
    """As `wait`, for an await; a cancelled await leaves the future alone."""
    await until_done(future)
    return future.result()
