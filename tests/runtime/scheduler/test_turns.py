from __future__ import annotations

from collections.abc import Callable

from sglite.runtime.scheduler.turns import Turns


def turns_of(gap: float, step_seconds: Callable[[int, int], float | None]) -> Turns:
    turns = Turns(step_seconds)
    for _ in range(20):
        turns.took(gap)
    return turns


def always(seconds: float | None) -> Callable[[int, int], float | None]:
    return lambda num_rows, num_tokens: seconds


def test_turns_pay_where_forced_text_is_likely_and_steps_are_long() -> None:
    assert turns_of(0.0004, always(0.004)).pay(1, runs=0.25)
    assert not turns_of(0.0004, always(0.0007)).pay(1, runs=0.25)  # the host's time is worth more than the step
    assert turns_of(0.0004, always(0.0007)).pay(1, runs=1.0)
    assert not turns_of(0.0004, always(0.004)).pay(1, runs=0.05)
    assert not turns_of(0.0004, always(0.004)).pay(0, runs=0.0)


def test_all_rows_wait_for_those_with_forced_text() -> None:
    turns = turns_of(0.0004, always(0.005))
    assert turns.pay(32, runs=8.0)
    assert not turns.pay(32, runs=2.0)


def test_forced_text_alone_is_no_reason_where_nothing_is_measured() -> None:
    assert not turns_of(0.0004, always(0.0)).pay(1, runs=0.5)
    assert not Turns(always(0.004)).pay(1, runs=0.5)


def test_one_slow_step_stops_no_turns() -> None:
    turns = turns_of(0.0004, always(0.004))
    turns.took(0.5)
    assert turns.pay(1, runs=0.25)


def test_drafts_must_be_worth_the_gap_and_the_larger_step() -> None:
    def seconds(num_rows: int, num_tokens: int) -> float:
        return 0.0006 if num_tokens > num_rows else 0.0005

    turns = turns_of(0.0003, seconds)
    assert turns.pay(1, runs=0.0, accepted=3.0, drafts=8)
    assert not turns.pay(1, runs=0.0, accepted=0.7, drafts=8)
    assert turns.pay(1, runs=0.5, accepted=0.7, drafts=8)  # both together
    assert not turns.pay(8, runs=0.0, accepted=3.0, drafts=8)  # seven rows wait for the eighth


def test_drafts_wait_for_a_device_that_is_not_ready() -> None:
    turns = turns_of(0.0003, lambda rows, tokens: 0.0005 if rows == tokens else None)
    assert not turns.pay(1, runs=0.0, accepted=5.0, drafts=8)


def test_drafts_are_tried_where_steps_are_not_measured() -> None:
    turns = turns_of(0.0003, always(0.0))
    assert turns.pay(1, runs=0.0, accepted=2.0, drafts=8)
    assert not turns.pay(8, runs=0.0, accepted=2.0, drafts=8)
