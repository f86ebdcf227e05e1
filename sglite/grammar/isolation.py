"""Constraints are planned in a process of its own, which can be killed.

The process starts at the first job, is used again by the next, and is replaced when it died.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

import msgspec

import sglite
from sglite import bytecode
from sglite.errors import GrammarTimeout, GrammarTooLarge, SgliteError
from sglite.grammar.worker import Answer, Job, read_message, write_message

_WALL_PER_CPU = 10.0  # a job may wait that much longer for a core than it may compute, and then is given up
_WALL_SECONDS = 10.0
_NICENESS = 19


class Worker:
    """One worker process, one job at a time; threads that ask wait for each other."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()  # of the fields
        self._turn = threading.Lock()  # to talk to the process
        self._closed = False

    def ask(self, job: Job) -> Answer:
        """Raises GrammarTimeout (out of CPU time, or the machine is too busy) or GrammarTooLarge (out of memory)."""
        with self._turn:
            return self._talk(self._running(), job)

    def start(self) -> None:
        """Start the process ahead of the first job; it gets ready by itself."""
        self._running()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            process, self._process = self._process, None
        if process is not None:
            self._end(process)

    def _talk(self, process: subprocess.Popen[bytes], job: Job) -> Answer:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            write_message(process.stdin, msgspec.msgpack.encode(job))
            if not select.select([process.stdout], [], [], _WALL_SECONDS + _WALL_PER_CPU * job.cpu_seconds)[0]:
                raise GrammarTimeout("the machine is too busy to check the constraint; try again")
            message = read_message(process.stdout)
        except BrokenPipeError:
            message = None
        except GrammarTimeout:
            self._end(process)
            raise
        if message is not None:
            return msgspec.msgpack.decode(message, type=Answer)
        self._end(process)
        raise _cause_of_death(process.returncode, job)

    def _running(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._closed:
                raise SgliteError("the grammar compiler is closed")
            if self._process is None or self._process.poll() is not None:
                self._process = _spawn()
            return self._process

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def _spawn() -> subprocess.Popen[bytes]:
    """A fresh interpreter, not a fork: this process may hold torch, its threads and a GPU context."""
    root = str(Path(sglite.__file__).parent.parent)
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, "-m", "sglite.grammar.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**bytecode.environment(), "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        # Ctrl-C in a terminal is for the process that owns this one. No session of its own: Linux weighs sessions
        # against each other (autogroup), so that the worker's niceness would mean nothing to its owner.
        process_group=0,
    )
    _step_back(process.pid)
    return process


def _step_back(pid: int) -> None:
    """Whatever the priority of this process, a real-time one too, the worker's is the lowest that still makes headway
    beside a busy engine: a new schema of 16 ms takes about 250 ms beside 40 rows that keep two cores busy (which is one
    step). SCHED_IDLE would let it starve."""
    with contextlib.suppress(OSError):  # it is gone already, or the system does not allow it
        if hasattr(os, "sched_setscheduler"):
            os.sched_setscheduler(pid, os.SCHED_BATCH, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, pid, _NICENESS)


def _cause_of_death(returncode: int, job: Job) -> SgliteError:
    if returncode == -signal.SIGXCPU:
        return GrammarTimeout(f"the constraint takes over {job.cpu_seconds:g} s to compile")
    if returncode in (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGKILL):
        return GrammarTooLarge(f"the constraint needs over {job.memory_bytes >> 20} MB, or breaks the grammar engine")
    return SgliteError(f"the grammar worker ended with status {returncode}")
