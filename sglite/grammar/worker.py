"""The process in which a constraint is planned and tried before this one takes it: `python -m sglite.grammar.worker`.

It reads jobs from standard input and writes one answer each to standard output, as msgpack with a length of four bytes
in front. Three limits hold for a job:

    memory   RLIMIT_AS: what the process has, and so much more. Python then raises MemoryError, native code aborts.
    time     an interval timer on its CPU time, which ends the job where Python runs
    time     RLIMIT_CPU one second later, which kills the process wherever it is

The process that asks notices an end of file and starts another one.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import resource
import signal
import sys
from functools import partial
from types import FrameType
from typing import IO, Literal

import msgspec

from sglite.errors import GrammarTooLarge
from sglite.grammar.engines import route
from sglite.grammar.engines.llguidance import LLGuidanceEngine
from sglite.grammar.residual.rules import ResidualRules
from sglite.grammar.vocab import Vocab
from sglite.protocol import Coverage, ErrorInfo, GrammarSpec

_NICENESS = 10
_TIMER_REPEATS = 0.05  # seconds
_LENGTH_BYTES = 4


class Job(msgspec.Struct, frozen=True):
    spec: GrammarSpec
    cpu_seconds: float
    memory_bytes: int


class Answer(msgspec.Struct, frozen=True):
    """`grammar` and `coverage` of the plan, or why there is none."""

    status: Literal["planned", "refused", "slow"]
    grammar: str = ""
    coverage: Coverage = Coverage()
    residual: ResidualRules | None = None
    error: ErrorInfo | None = None


def read_message(stream: IO[bytes]) -> bytes | None:
    """The next message's bytes; None at the end of the stream, also in the middle of one."""
    head = stream.read(_LENGTH_BYTES)
    if len(head) < _LENGTH_BYTES:
        return None
    size = int.from_bytes(head, "big")
    body = stream.read(size)
    return body if len(body) == size else None


def write_message(stream: IO[bytes], body: bytes) -> None:
    stream.write(len(body).to_bytes(_LENGTH_BYTES, "big") + body)
    stream.flush()


class _OutOfTime(BaseException):
    """Not an Exception: nothing between the timer and this file may catch it."""


def main() -> None:
    os.nice(_NICENESS)
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGVTALRM, _on_timer)
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # whatever a library prints must not break into the messages
    engine = LLGuidanceEngine(Vocab.of_bytes())
    gc.disable()  # a third of a long plan's time; what one leaves behind is collected before the next one
    gc.freeze()
    while (message := read_message(stdin)) is not None:
        try:
            answer = _answer(msgspec.msgpack.decode(message, type=Job), engine)
        except _OutOfTime:  # on the way out, a moment before the timer was stopped
            answer = Answer("slow")
        write_message(stdout, msgspec.msgpack.encode(answer))
        del answer
        gc.collect()


def _answer(job: Job, engine: LLGuidanceEngine) -> Answer:
    _limit(job)
    try:
        # Again and again: one that falls into a finaliser or a callback is swallowed there.
        signal.setitimer(signal.ITIMER_VIRTUAL, job.cpu_seconds, _TIMER_REPEATS)
        plan = route.plan(job.spec)
        if plan.engine == engine.name and not route.is_tame(plan.grammar):
            engine.compile(job.spec, plan.grammar)
        return Answer("planned", plan.grammar, plan.coverage.brief(), plan.residual)
    except BaseException as error:  # noqa: BLE001 - a fault of ours or an engine's ends this job and no other
        # Nothing is made here: CPython 3.11 tries for ever to leave a handler where no memory is left to do so.
        failure = error
    finally:
        _lift_memory()
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return _failed(failure, job)


def _failed(failure: BaseException, job: Job) -> Answer:
    match failure:
        case _OutOfTime():
            return Answer("slow")
        case MemoryError() | SystemError():  # the second from native code that did not expect the first
            failure = GrammarTooLarge(f"the constraint needs over {job.memory_bytes >> 20} MB")
        case RecursionError():
            failure = GrammarTooLarge("the constraint is nested too deeply")
        case Exception():
            pass
        case _:
            raise failure
    return Answer("refused", error=ErrorInfo.of(failure))


def _limit(job: Job) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = math.ceil(used.ru_utime + used.ru_stime + job.cpu_seconds + 1)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_AS, (_address_space() + job.memory_bytes, resource.RLIM_INFINITY))


_lift_memory = partial(resource.setrlimit, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def _address_space() -> int:
    """Bytes of virtual memory that this process has mapped."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _on_timer(signum: int, frame: FrameType | None) -> None:
    raise _OutOfTime


if __name__ == "__main__":
    main()
