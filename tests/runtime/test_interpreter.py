from __future__ import annotations

import gc
import sys

from sglite.runtime.async_engine.interpreter import beside_a_loop, collect_at_rest


def test_threads_give_way_and_whole_collections_wait_while_a_loop_runs() -> None:
    before = sys.getswitchinterval(), gc.get_threshold()
    with beside_a_loop():
        assert sys.getswitchinterval() < 0.001
        assert gc.get_threshold()[2] >= 1000
        assert gc.get_threshold()[0] == before[1][0]
    assert (sys.getswitchinterval(), gc.get_threshold()) == before


def test_engines_that_end_in_another_order_leave_what_was_there() -> None:
    before = sys.getswitchinterval(), gc.get_threshold()
    first, second = beside_a_loop(), beside_a_loop()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert (sys.getswitchinterval(), gc.get_threshold()) == before


def test_what_was_put_off_is_collected_at_rest() -> None:
    with beside_a_loop():
        for _ in range(32):
            gc.collect(1)
        assert gc.get_count()[2] >= 30
        collect_at_rest()
        assert gc.get_count()[2] < 30
