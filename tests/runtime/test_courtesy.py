"""Threads beside a step loop let it go first, and wait for it no longer than some milliseconds."""

from __future__ import annotations

import threading
import time

from sglite.runtime.async_engine.courtesy import MOST_S, Courtesy
from tests.fakes.core import scripted_engine


def test_nobody_waits_for_a_loop_that_rests() -> None:
    courtesy = Courtesy()
    began = time.monotonic()
    for _ in range(100):
        courtesy.after_you()
    assert time.monotonic() - began < MOST_S


def test_who_is_courteous_goes_on_when_the_loop_rests() -> None:
    courtesy, order = Courtesy(), list[str]()
    courtesy.work()

    def other() -> None:
        courtesy.after_you()
        order.append("other")

    thread = threading.Thread(target=other)
    thread.start()
    order.append("loop")
    courtesy.rest()
    thread.join()
    assert order == ["loop", "other"]


def test_a_loop_that_never_rests_is_waited_for_only_now_and_then() -> None:
    courtesy = Courtesy()
    courtesy.work()
    began = time.monotonic()
    for _ in range(1000):
        courtesy.after_you()
    assert time.monotonic() - began < 100 * MOST_S


def test_an_engine_is_at_rest_when_nobody_asks_for_anything() -> None:
    with scripted_engine() as engine:
        engine.generate("hello", {"max_tokens": 3})
        deadline = time.monotonic() + 5
        while not engine._front.courtesy._at_rest.is_set():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        began = time.monotonic()
        engine.after_you()
        assert time.monotonic() - began < MOST_S
