"""Calls of a batch's programs reach the client together, whatever the programs do between them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

import sglite as sgl
from sglite.lang import together
from sglite.protocol import GenerateRequest, RequestOutput
from tests.fakes.client import ScriptedClient


class Watched(ScriptedClient):
    """Counts the calls that come within two turns of the event loop after the first one of their wave. All of a wave
    are answered at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.together = 0
        self._open = False
        self._here: list[asyncio.Future[None]] = []

    async def stream_request(self, request: GenerateRequest) -> AsyncIterator[RequestOutput]:
        loop = asyncio.get_running_loop()
        if not self._here:
            self._open = True
            loop.call_soon(lambda: loop.call_soon(self._close))
            loop.call_later(0.02, self._answer_all)
        self.together += self._open
        future = loop.create_future()
        self._here.append(future)
        await future
        async for output in super().stream_request(request):
            yield output

    def _close(self) -> None:
        self._open = False

    def _answer_all(self) -> None:
        here, self._here = self._here, []
        for future in here:
            future.set_result(None)


@sgl.function
def three_turns(s: Any, i: int) -> None:
    for turn in range(3):
        s += f"{i} {turn}:" + sgl.gen(f"x{turn}", max_tokens=4)
        assert s[f"x{turn}"]


def test_each_wave_of_a_batch_comes_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "MOST_S", 1.0)  # the machine of the tests may be busy
    client = Watched()
    three_turns.run_batch([(i,) for i in range(12)], backend=client)  # shows that the program is quick
    client.together = 0
    three_turns.run_batch([(i,) for i in range(12)], backend=client)
    assert client.together >= 30  # of 36


def test_a_place_in_a_batch_is_taken_when_its_program_ends_not_when_its_reader_looks() -> None:
    client = ScriptedClient()

    @sgl.function
    def program(s: Any, i: int) -> float:
        began = time.monotonic()
        s += f"{i}:" + sgl.gen("x")
        return began

    reader = program.run_batch([(i,) for i in range(4)], backend=client, num_threads=1, generator_style=True)
    first = next(iter(reader)).ret_value
    time.sleep(0.3)
    second = next(iter(reader)).ret_value
    assert second - first < 0.25
