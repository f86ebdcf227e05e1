"""What an event loop asks of the engine in one turn leaves in one piece, in order, and is never left behind."""

from __future__ import annotations

import asyncio

from sglite.runtime.async_engine import messages as m
from sglite.runtime.async_engine.outbox import Outbox


def _release(number: int) -> m.Release:
    return m.Release(str(number))


def test_a_turn_of_a_loop_is_one_piece() -> None:
    sent: list[list[m.Command]] = []
    outbox = Outbox(sent.append)

    async def ask(number: int) -> None:
        outbox.post([_release(number)])

    async def all_at_once() -> None:
        await asyncio.gather(*(ask(i) for i in range(10)))
        await asyncio.sleep(0)

    asyncio.run(all_at_once())
    assert sent == [[_release(i) for i in range(10)]]


def test_what_cannot_wait_takes_along_what_came_before() -> None:
    sent: list[list[m.Command]] = []
    outbox = Outbox(sent.append)

    async def ask() -> None:
        outbox.post([_release(1)])
        outbox.send([m.Abort("1")])
        assert sent == [[_release(1), m.Abort("1")]]
        await asyncio.sleep(0)

    asyncio.run(ask())
    assert len(sent) == 1


def test_a_loop_that_ended_before_its_next_turn_leaves_nothing_behind() -> None:
    sent: list[list[m.Command]] = []
    outbox = Outbox(sent.append)
    ended = asyncio.new_event_loop()

    async def ask(number: int) -> None:
        outbox.post([_release(number)])

    ended.run_until_complete(ask(1))
    ended.close()
    sent.clear()
    outbox.post([_release(2)])  # no loop runs: at once
    assert sent[-1][-1] == _release(2)

    async def later() -> None:
        await ask(3)
        await asyncio.sleep(0)

    asyncio.run(later())
    assert sent[-1] == [_release(3)]
