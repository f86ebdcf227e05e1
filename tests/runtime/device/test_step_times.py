"""What the CUDA device measures of its steps and how it rations captures, with a clock and events of its own."""

from __future__ import annotations

from sglite.runtime.device.cuda.step_times import Event, StepTimes
from sglite.runtime.device.cuda.wanted import Wanted


class Stream:
    """A device that carries out what was queued when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0  # milliseconds
        self.done = 0
        self.queued: list[FakeEvent] = []

    def finish(self) -> None:
        self.done = len(self.queued)


class FakeEvent:
    made = 0

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._at = 0.0
        self._place = 0
        FakeEvent.made += 1

    def record(self) -> None:
        self._stream.queued.append(self)
        self._at, self._place = self._stream.now, len(self._stream.queued)

    def query(self) -> bool:
        return self._place <= self._stream.done

    def elapsed_time(self, end_event: Event, /) -> float:
        assert isinstance(end_event, FakeEvent)
        return end_event._at - self._at


def run(times: StepTimes, stream: Stream, kind: str, milliseconds: float) -> None:
    def launch() -> None:
        stream.now += milliseconds

    times.run(kind, launch)


def test_a_step_is_measured_when_the_device_is_through_with_it() -> None:
    stream = Stream()
    times = StepTimes(lambda: FakeEvent(stream))
    run(times, stream, "one", 5.0)
    assert times.seconds("one") is None
    stream.finish()
    assert times.seconds("one") == 0.005
    assert times.seconds("other") is None


def test_the_median_of_the_last_steps_counts() -> None:
    stream = Stream()
    times = StepTimes(lambda: FakeEvent(stream))
    for milliseconds in (90.0, 5.0, 6.0, 5.0, 70.0):
        run(times, stream, "one", milliseconds)
    stream.finish()
    assert times.seconds("one") == 0.006


def test_most_steps_are_not_measured_and_events_are_used_again() -> None:
    stream = Stream()
    times = StepTimes(lambda: FakeEvent(stream))
    for _ in range(1000):
        run(times, stream, "one", 1.0)
        stream.finish()
    assert len(stream.queued) < 200
    before = FakeEvent.made
    for _ in range(100):
        run(times, stream, "one", 1.0)
        stream.finish()
    assert FakeEvent.made == before


def ask_often(wanted: Wanted[str], key: str) -> None:
    for _ in range(50):
        wanted.ask(key)


def test_a_graph_is_captured_when_it_was_wanted_often() -> None:
    wanted: Wanted[str] = Wanted(lambda: 0.0)
    assert wanted.take(idle=False) is None
    wanted.ask("a")
    wanted.ask("a")
    assert wanted.take(idle=False) is None
    ask_often(wanted, "b")
    assert wanted.take(idle=False) == "b"
    assert wanted.take(idle=False) is None
    assert wanted.take(idle=True) == "a"  # nobody waits


def test_captures_take_a_small_share_of_the_time() -> None:
    now = 0.0
    wanted: Wanted[str] = Wanted(lambda: now)
    captured = 0
    for step in range(10_000):  # of 5 ms, each of another size
        now += 0.005
        ask_often(wanted, str(step))
        if wanted.take(idle=False) is not None:
            captured += 1
            wanted.spend(0.02)
            now += 0.02
    assert 0.015 < captured * 0.02 / now < 0.025
    assert captured > 10


def test_captures_begin_at_once_but_not_all_at_once() -> None:
    wanted: Wanted[str] = Wanted(lambda: 0.0)
    captured = 0
    for key in range(100):
        ask_often(wanted, str(key))
        if wanted.take(idle=False) is not None:
            captured += 1
            wanted.spend(0.02)
    assert captured == 5


def test_keys_that_nobody_wants_any_more_are_forgotten() -> None:
    wanted: Wanted[str] = Wanted(lambda: 0.0)
    for key in range(1000):
        wanted.ask(str(key))
    assert len(wanted._asked) <= 64


def test_a_capture_that_compiled_its_kernels_does_not_hold_up_those_behind_it_for_minutes() -> None:
    now = [0.0]
    wanted: Wanted[int] = Wanted(lambda: now[0])
    wanted.spend(3.0)
    assert not wanted.may_capture
    now[0] = 4.0
    assert not wanted.may_capture
    now[0] = 6.0
    assert wanted.may_capture
