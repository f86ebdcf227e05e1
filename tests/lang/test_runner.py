"""Runs that are stopped: what they had begun ends with them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

import sglite as sgl
from sglite.errors import ProgramError, ProgramSyntaxError
from sglite.lang import runner
from sglite.lang.branch import LOOK_AHEAD
from sglite.protocol import GenerateRequest, RequestOutput
from tests.fakes.client import ScriptedClient


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 5
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)


class Never(ScriptedClient):
    """Does not answer."""

    async def stream_request(self, request: GenerateRequest) -> AsyncIterator[RequestOutput]:
        self.running += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.running -= 1
        async for output in super().stream_request(request):
            yield output


@sgl.function
def asks(s: Any) -> None:
    s += "x" + sgl.gen("x")


@sgl.function
async def asks_async(s: Any) -> None:
    s += "x" + sgl.gen("x")


@pytest.mark.parametrize("inner", [asks, asks_async])
@pytest.mark.parametrize("kind", ["run", "batch", "stream"])
def test_a_program_that_is_stopped_stops_the_programs_that_it_runs(kind: str, inner: Any) -> None:
    client = Never()

    @sgl.function
    def outer(s: Any) -> None:
        if kind == "run":
            inner.run(backend=client)
        elif kind == "batch":
            inner.run_batch([(), ()], backend=client)
        else:
            inner.run(stream=True, backend=client).text()

    state = outer.run(backend=client, stream=True)
    wait_until(lambda: client.running == 1 + (kind == "batch"))
    state.cancel()
    assert "cancelled by the program" in str(state.error())
    wait_until(lambda: client.running == 0)


def test_an_interrupt_behind_the_function_gives_up_what_was_held_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Never()

    def interrupted(future: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        asks.run(backend=client)
    wait_until(lambda: len(client.ended) == 1)


def test_a_cancelled_run_says_nothing_to_a_loop_that_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    client, held, left = Never(), threading.Event(), threading.Event()

    @sgl.function
    def program(s: Any) -> None:
        held.wait(5)
        left.set()

    async def main() -> None:
        await asyncio.wait_for(program.run_async(backend=client), 0.01)

    with pytest.raises(TimeoutError):
        asyncio.run(main())
    held.set()
    assert left.wait(5)
    wait_until(lambda: len(client.ended) == 1)
    assert not caplog.records


async def test_a_reader_that_leaves_a_batch_ends_its_programs_before_it_goes_on() -> None:
    cancelled: list[str] = []

    class Some(Never):
        async def stream_request(self, request: GenerateRequest) -> AsyncIterator[RequestOutput]:
            source = ScriptedClient if self.text_of(request.prompt).startswith("0") else Never
            async for output in source.stream_request(self, request):
                yield output

    @sgl.function
    def program(s: Any, i: int) -> None:
        try:
            s += f"{i}" + sgl.gen("x")
            assert s["x"]
        except Exception as error:
            cancelled.append(str(error))
            raise

    states = program.run_batch_async([(0,), (1,), (2,)], backend=Some())
    assert (await anext(states))["x"]
    await states.aclose()
    wait_until(lambda: len(cancelled) == 2)
    assert all("its reader has gone" in text for text in cancelled)


@sgl.function
def cancels_itself(s: Any) -> None:
    raise asyncio.CancelledError("mine")


@sgl.function
async def awaits_what_is_cancelled(s: Any) -> None:
    task = asyncio.ensure_future(asyncio.sleep(5))
    task.cancel("mine")
    await task


@pytest.mark.parametrize("program", [cancels_itself, awaits_what_is_cancelled])
def test_a_cancellation_within_a_program_is_its_own_error(program: Any) -> None:
    states = program.run_batch([(), ()], backend=ScriptedClient(), on_error="return")
    for state in states:
        error = state.error()
        assert error is not None
        assert isinstance(error.__cause__, asyncio.CancelledError)
    with pytest.raises(ProgramError, match="CancelledError"):
        program.run(backend=ScriptedClient())


async def test_a_cancelled_task_ends_its_program_and_is_cancelled() -> None:
    client = Never()
    for program in (asks, asks_async):
        task = asyncio.ensure_future(program.run_async(backend=client))
        while not client.running:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while client.running:
            await asyncio.sleep(0.001)


def test_an_error_of_a_batch_in_a_batch_says_both_places() -> None:
    @sgl.function
    def inner(s: Any, i: int) -> None:
        assert i != 1, "not this one"

    @sgl.function
    def outer(s: Any, i: int) -> None:
        inner.run_batch([(0,), (1,)], backend=client)

    client = ScriptedClient()
    for i, state in enumerate(outer.run_batch([(0,), (1,), (2,)], backend=client, on_error="return")):
        text = str(state.error())
        assert f"program {i} (outer)" in text
        assert "program 1 (inner)" in text


def test_an_error_without_a_text_is_told_by_its_class() -> None:
    class OddError(Exception):
        def __str__(self) -> str:
            raise ValueError("no text")

    @sgl.function
    def program(s: Any) -> None:
        raise OddError

    with pytest.raises(ProgramError, match="OddError"):
        program.run(backend=ScriptedClient())
    state = program.run(backend=ScriptedClient(), stream=True)
    assert "OddError" in str(state.error())


def test_what_cannot_be_a_program_is_refused_where_it_is_made() -> None:
    def yields(s: Any) -> Any:
        yield 1

    async def yields_async(s: Any) -> Any:
        yield 1

    for function in (yields, yields_async):
        with pytest.raises(ProgramSyntaxError, match="yield"):
            sgl.function(function)
    with pytest.raises(ProgramSyntaxError, match="already"):
        sgl.function(asks)


def test_thousands_of_operations_may_be_appended_at_once() -> None:
    looked: list[int] = []

    class Looks(ScriptedClient):
        async def stream_request(self, request: GenerateRequest) -> AsyncIterator[RequestOutput]:
            assert request.program is not None
            looked.append(request.program.remaining)
            async for output in super().stream_request(request):
                yield output

    @sgl.function
    def many(s: Any) -> None:
        for i in range(500):
            s += sgl.gen(f"g{i}", max_tokens=1)

    many.run(backend=Looks())
    assert looked[-3:] == [2, 1, 0]
    assert max(looked) <= LOOK_AHEAD
