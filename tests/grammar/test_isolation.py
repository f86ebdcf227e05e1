from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from sglite.errors import GrammarTimeout, GrammarTooLarge, SgliteError
from sglite.grammar import isolation, spec
from sglite.grammar.engines import route
from sglite.grammar.isolation import Worker
from sglite.grammar.worker import Answer, Job

_MB = 1 << 20
BIG = spec.json_schema({"anyOf": [{"const": f"some text {n}"} for n in range(3_000)]})


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.close()


def small(worker: Worker) -> Answer:
    return worker.ask(Job(spec.json_schema({"type": "null"}), 2.0, 512 * _MB))


def test_a_job_comes_back_planned(worker):
    answer = small(worker)
    assert answer.status == "planned"
    assert answer.grammar
    assert answer.coverage.exact


def test_out_of_time_is_said_and_the_next_job_runs(worker):
    assert worker.ask(Job(BIG, 0.005, 512 * _MB)).status == "slow"
    assert small(worker).status == "planned"


@pytest.mark.parametrize("memory", range(400_000, 1_200_000, 100_000))
def test_out_of_memory_refuses_the_constraint_and_the_next_job_runs(worker, memory):
    try:
        answer = worker.ask(Job(BIG, 5.0, memory))
    except GrammarTooLarge:
        pass
    else:
        assert answer.error is not None
        assert answer.error.type == "GrammarTooLarge"
    assert small(worker).status == "planned"


@pytest.mark.parametrize(
    ("number", "expected"),
    [(signal.SIGXCPU, GrammarTimeout), (signal.SIGABRT, GrammarTooLarge), (signal.SIGTERM, SgliteError)],
)
def test_a_worker_that_dies_is_an_error_of_that_job_alone(monkeypatch, number, expected):
    def doomed() -> subprocess.Popen[bytes]:
        script = f"import os, sys; sys.stdin.buffer.read(4); os.kill(os.getpid(), {int(number)})"
        return subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    worker = Worker()
    with monkeypatch.context() as patch:
        patch.setattr(isolation, "_spawn", doomed)
        with pytest.raises(expected):
            small(worker)
    assert small(worker).status == "planned"
    worker.close()


def test_nothing_is_left_running_after_close():
    worker = Worker()
    small(worker)
    process = worker._process
    assert process is not None
    worker.close()
    assert process.poll() is not None
    with pytest.raises(SgliteError, match="closed"):
        small(worker)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="scheduling classes are Linux's")
def test_a_worker_steps_back_behind_its_owner_and_hears_no_ctrl_c(worker):
    small(worker)
    pid = worker._process.pid
    assert os.sched_getscheduler(pid) == os.SCHED_BATCH
    assert os.getpriority(os.PRIO_PROCESS, pid) == 19
    assert os.getsid(pid) == os.getsid(0), "niceness counts within a session only, where Linux groups by them"
    assert os.getpgid(pid) == pid


def test_of_many_assertions_only_those_are_told_that_the_mask_does_not_carry(worker):
    many = {f"key{i}": {"type": "string", "maxLength": i} for i in range(400)}
    odd = {"odd": {"type": "string", "format": "no-such-format"}}
    for properties in (dict(list(many.items())[:3]), many, many | odd):
        wanted = spec.json_schema({"properties": properties}, on_unsupported="validate")
        told = worker.ask(Job(wanted, 2.0, 512 * _MB)).coverage
        assert told == route.plan(wanted).coverage and told.exact and told.engine == "llguidance"
        assert len(told.items) == (7 if len(properties) == 3 else 0)
