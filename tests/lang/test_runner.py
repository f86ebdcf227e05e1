"""Runs that are stopped: what they had begun ends with them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

import sglite as sgl
from sglite.lang import runner
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
