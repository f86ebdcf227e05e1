from __future__ import annotations

from typing import Any

import numpy as np

from sglite.protocol import ProgramRef
from sglite.runtime.batch import GREEDY
from sglite.runtime.cache.radix_tree import Namespace
from sglite.runtime.request import Job, Request
from sglite.runtime.scheduler.policy import FirstCome, OldestProgram, WaitingList


def _request(
    name: str, arrival: float, *, priority: int = 0, cached: int = 0, program: dict[str, Any] | None = None
) -> Request:
    ref = None if program is None else ProgramRef(**program)
    job = Job(name, None, arrival, priority, ref)
    ids = np.zeros(1, np.int32)
    request = Request(job, 0, ids, 1, 1, 1, 1, False, GREEDY, Namespace())
    request.cached_hint = cached
    return request


def _order(waiting: WaitingList, now: float = 0.0) -> list[str]:
    return [r.job.request_id for r in waiting.ordered(now)]


def _list(order: FirstCome | OldestProgram, *requests: Request) -> WaitingList:
    waiting = WaitingList(order, max_wait_s=10.0, gang_wait_s=0.01)
    for i, request in enumerate(requests):
        request.sequence = i
        waiting.add(request)
    return waiting


def test_first_come_goes_by_priority_then_arrival() -> None:
    waiting = _list(FirstCome(), _request("b", 2.0), _request("a", 1.0), _request("urgent", 3.0, priority=-1))
    assert _order(waiting) == ["urgent", "a", "b"]


def test_the_oldest_program_goes_first_then_the_longest_way_then_the_best_cached() -> None:
    waiting = _list(
        OldestProgram(),
        _request("young", 1.0, program=dict(program_id="y", arrival=5.0)),
        _request("near the end", 3.0, program=dict(program_id="o", arrival=0.5, remaining=1)),
        _request("far", 4.0, program=dict(program_id="o", arrival=0.5, remaining=3)),
        _request("far, cached", 4.5, program=dict(program_id="o", arrival=0.5, remaining=3), cached=9),
        _request("loose", 2.0),
    )
    assert _order(waiting) == ["far, cached", "far", "near the end", "loose", "young"]


def test_nobody_waits_for_ever() -> None:
    waiting = _list(FirstCome(), _request("low", 0.0, priority=9), _request("high", 8.0))
    assert _order(waiting, now=9.0) == ["high", "low"]
    assert _order(waiting, now=10.5) == ["low", "high"]


def test_siblings_are_waited_for_a_moment() -> None:
    ref = {"program": {"program_id": "p", "siblings": 2}}
    first = _request("1", 0.0, **ref)
    waiting = _list(OldestProgram(), first)
    assert waiting.waits_for_siblings(first, 0.005)
    assert not waiting.waits_for_siblings(first, 0.02)
    second = _request("2", 0.006, **ref)
    waiting.add(second)
    assert not waiting.waits_for_siblings(first, 0.007)
    waiting.remove(second)
    assert first in waiting
    assert second not in waiting
    assert len(waiting) == 1
