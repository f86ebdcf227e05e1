"""The threads and loops that programs run on outlive what programs do to them."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

import sglite as sgl
from sglite.lang.bridge import LoopThread, Pace, WorkerPool, wait
from tests.fakes.client import ScriptedClient


@contextlib.contextmanager
def _loop_thread() -> Iterator[LoopThread]:
    thread = LoopThread("test-loop")
    try:
        yield thread
    finally:
        thread.close()
        thread.loop.close()


async def _seven() -> int:
    return 7


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_an_exit_in_a_coroutine_reaches_the_caller_and_the_loop_goes_on(kind: type[BaseException]) -> None:
    async def leave() -> None:
        raise kind(4)

    with _loop_thread() as thread:
        with pytest.raises(kind):
            thread.submit(leave()).result(5)
        assert thread.submit(_seven()).result(5) == 7


def test_an_exit_in_a_task_of_the_programs_own_does_not_end_the_loop() -> None:
    async def leave() -> None:
        raise SystemExit(4)

    async def program() -> int:
        with pytest.raises(SystemExit):
            await asyncio.ensure_future(leave())
        return 7

    with _loop_thread() as thread:
        assert thread.submit(program()).result(5) == 7


def test_a_cancelled_future_cancels_its_coroutine() -> None:
    began, cancelled = threading.Event(), threading.Event()

    async def forever() -> None:
        began.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with _loop_thread() as thread:
        future = thread.submit(forever())
        assert began.wait(5)
        assert future.cancel()
        assert cancelled.wait(5)


def test_an_async_program_that_exits_leaves_the_next_one_running() -> None:
    @sgl.function
    async def leaves(s: Any) -> None:
        raise SystemExit(4)

    @sgl.function
    async def answers(s: Any) -> None:
        s += "x" + sgl.gen("a")

    with pytest.raises(SystemExit):
        leaves.run(backend=ScriptedClient())
    assert answers.run(backend=ScriptedClient(["yes"]))["a"] == "yes"


_FORKED = """
import os, sys
import sglite as sgl
from tests.fakes.client import ScriptedClient

@sgl.function
def plain(s):
    s += "x" + sgl.gen("a")

@sgl.function
async def coroutine(s):
    s += "x" + sgl.gen("a")

def all_kinds():
    client = ScriptedClient(lambda prompt: "yes")
    found = [plain.run(backend=client), coroutine.run(backend=client), *plain.run_batch([{}] * 2, backend=client)]
    assert [state["a"] for state in found] == ["yes"] * 4

all_kinds()
pid = os.fork()
all_kinds()
if pid:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="has no fork")
def test_programs_run_in_a_forked_child() -> None:
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-W", "ignore", "-c", _FORKED], check=True, timeout=20, cwd=root)


def _submitted(pool: WorkerPool, pace: Pace, functions: list[Any]) -> list[Any]:
    return [future.result(5) for future in [pool.submit(function, pace) for function in functions]]


def test_functions_that_are_known_to_be_quick_share_one_thread() -> None:
    pool, pace = WorkerPool(), Pace()
    _submitted(pool, pace, [lambda: None])
    assert pace.quick
    assert len(set(_submitted(pool, pace, [threading.get_ident] * 20))) == 1
    pool.close()


def test_functions_that_block_get_threads_of_their_own() -> None:
    pool, pace = WorkerPool(), Pace()

    def blocks() -> int:
        time.sleep(0.05)
        return threading.get_ident()

    _submitted(pool, pace, [blocks])
    assert not pace.quick
    began = time.monotonic()
    assert len(set(_submitted(pool, pace, [blocks] * 8))) >= 6
    assert time.monotonic() - began < 0.35
    pool.close()


def test_a_quick_function_does_not_wait_for_one_that_blocks_for_once() -> None:
    pool, pace = WorkerPool(), Pace()
    _submitted(pool, pace, [lambda: None])
    gate = threading.Event()
    stuck = pool.submit(gate.wait, pace)
    while not any(worker.stuck for worker in pool._workers):
        time.sleep(0.005)
    assert pool.submit(lambda: 7, pace).result(5) == 7
    gate.set()
    assert stuck.result(5)
    assert not pace.quick
    pool.close()


def test_functions_that_share_a_thread_may_each_run_an_event_loop_of_their_own() -> None:
    pool, pace = WorkerPool(max_workers=1), Pace()
    gates: list[Future[int]] = [Future(), Future()]

    async def numbers() -> AsyncIterator[int]:
        yield 1
        yield 2

    async def main(gate: Future[int]) -> int:
        async for _ in numbers():
            loop, task = asyncio.get_running_loop(), asyncio.current_task()
            assert wait(gate) == 7
            assert (asyncio.get_running_loop(), asyncio.current_task()) == (loop, task)
            await asyncio.sleep(0)
        return threading.get_ident()

    def outside() -> None:
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        for gate in gates:
            gate.set_result(7)

    begun = [pool.submit(lambda gate=gate: asyncio.run(main(gate)), pace) for gate in gates]
    pool.submit(outside, pace).result(5)
    assert len({future.result(5) for future in begun}) == 1
    pool.close()


def test_functions_that_wait_with_a_lock_do_not_share_a_thread_with_those_that_want_it() -> None:
    pool, pace, lock = WorkerPool(max_workers=2), Pace(), threading.Lock()
    _submitted(pool, pace, [lambda: None])
    gate: Future[int] = Future()

    def locked() -> int:
        with lock:
            return wait(gate)

    begun = [pool.submit(locked, pace) for _ in range(5)]
    while not lock.locked():
        time.sleep(0.001)
    gate.set_result(7)
    assert [future.result(5) for future in begun] == [7] * 5
    pool.close()


def test_a_function_that_holds_its_thread_may_wait_for_one_that_was_to_begin_there() -> None:
    pool, pace, lock = WorkerPool(max_workers=1), Pace(), threading.Lock()
    _submitted(pool, pace, [lambda: None])

    def outer() -> int:
        inner = pool.submit(lambda: 7, pace)
        with lock:
            return wait(inner)

    assert pool.submit(outer, pace).result(5) == 7
    pool.close()


def test_blocks_of_a_state_hold_nothing() -> None:
    client = ScriptedClient()

    @sgl.function
    def program(s: Any) -> None:
        with s.user(), s.var_scope("part"):
            s += "x" + sgl.gen("a", max_tokens=2)
            assert s["a"]
        with s.copy() as t:
            t += sgl.gen("b", max_tokens=2)
            assert t["b"]

    assert all(state.ret_value is None for state in program.run_batch([()] * 5, backend=client))
    assert not program.pace.holds


def test_what_many_threads_want_of_a_loop_costs_one_wake_up_and_keeps_its_order() -> None:
    with _loop_thread() as thread:
        held, done = threading.Event(), threading.Event()
        found: list[int] = []
        wakes = 0
        real = thread.loop.call_soon_threadsafe

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal wakes
            wakes += 1
            return real(*args, **kwargs)

        thread.loop.call_soon_threadsafe = counted  # type: ignore[method-assign]
        thread.posts.post(held.wait)
        while not thread.posts._waking and wakes == 0:
            time.sleep(0.001)
        time.sleep(0.02)  # the loop stands in held.wait
        for i in range(50):
            thread.posts.post(found.append, i)
        thread.posts.post(done.set)
        held.set()
        assert done.wait(5)
        assert found == list(range(50))
        assert wakes <= 2
