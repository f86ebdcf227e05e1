from __future__ import annotations

from collections.abc import Callable

from sglite.runtime.scheduler.turns import Turns


def turns_after(share: float, gap: float, step_seconds: Callable[[int, int], float | None]) -> Turns:
    """After many steps in which that share of the draws was followed by forced text."""
    turns = Turns(step_seconds)
    for _ in range(200):
        turns.drew(100, round(100 * share))
        turns.took(gap)
    return turns


def always(seconds: float | None) -> Callable[[int, int], float | None]:
    return lambda num_rows, num_tokens: seconds


def test_turns_pay_where_forced_text_is_frequent_and_steps_are_long() -> None:
    assert turns_after(0.25, 0.0004, always(0.004)).pay(1)
    assert not turns_after(0.25, 0.0004, always(0.0007)).pay(1)  # the host's time is worth more than the steps
    assert not turns_after(0.05, 0.0004, always(0.004)).pay(1)
    assert not turns_after(0.25, 0.0004, always(0.004)).pay(0)


def test_forced_text_alone_is_no_reason_where_nothing_is_measured() -> None:
    assert not turns_after(0.5, 0.0004, always(0.0)).pay(1)
    assert not Turns(always(0.004)).pay(1)


def test_one_slow_step_stops_no_turns() -> None:
    turns = turns_after(0.25, 0.0004, always(0.004))
    turns.took(0.5)
    assert turns.pay(1)


def test_drafts_must_be_worth_the_gap_and_the_larger_step() -> None:
    def seconds(num_rows: int, num_tokens: int) -> float:
        return 0.0006 if num_tokens > num_rows else 0.0005

    turns = turns_after(0.0, 0.0003, seconds)
    assert turns.pay(1, accepted=3.0, drafts=8)
    assert not turns.pay(1, accepted=0.7, drafts=8)
    assert not turns.pay(8, accepted=3.0, drafts=8)  # seven rows wait for the eighth


def test_drafts_wait_for_a_device_that_is_not_ready() -> None:
    turns = turns_after(0.0, 0.0003, lambda rows, tokens: 0.0005 if rows == tokens else None)
    assert not turns.pay(1, accepted=5.0, drafts=8)


def test_drafts_are_tried_where_steps_are_not_measured() -> None:
    turns = turns_after(0.0, 0.0003, always(0.0))
    assert turns.pay(1, accepted=2.0, drafts=8)
    assert not turns.pay(8, accepted=2.0, drafts=8)
