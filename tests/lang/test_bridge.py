"""The threads and loops that programs run on outlive what programs do to them."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sglite as sgl
from sglite.lang.bridge import LoopThread
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
