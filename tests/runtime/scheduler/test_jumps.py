from __future__ import annotations

from collections.abc import Callable

import pytest

from sglite.runtime.scheduler.jumps import JumpPolicy
from tests.fakes.executor import ScriptedExecutor
from tests.fakes.matcher import choice
from tests.runtime.harness import Harness


def measured(times: dict[int, float | None]) -> Callable[[int, int], float | None]:
    """Seconds by the step's tokens."""
    return lambda num_rows, num_tokens: times[num_tokens]


def test_a_few_rows_jump_whenever_a_step_is_saved() -> None:
    policy = JumpPolicy(overlaps=True)
    assert policy.pays({0: 1}, 1)
    assert policy.pays({2: 1}, 8)
    assert not policy.pays({}, 1)


def test_without_measurements_the_steps_saved_must_outweigh_an_eighth() -> None:
    policy = JumpPolicy(overlaps=True)
    assert not policy.pays({0: 3}, 32)
    assert policy.pays({0: 3, 5: 1}, 32)


def test_a_step_that_costs_what_it_reads_is_worth_every_forced_token() -> None:
    policy = JumpPolicy(overlaps=True, step_seconds=measured({32: 0.0052, 33: 0.0053, 48: 0.0053}))
    assert policy.pays({0: 1}, 32)
    assert policy.pays(dict.fromkeys(range(8), 2), 32)


def test_a_step_whose_time_grows_with_its_tokens_is_worth_none() -> None:
    policy = JumpPolicy(overlaps=True, step_seconds=measured({64: 0.005, 80: 0.007}))
    assert not policy.pays(dict.fromkeys(range(8), 2), 64)


def test_many_rows_draw_their_forced_text_where_the_host_is_busy_beside_the_device() -> None:
    asked: list[int] = []
    policy = JumpPolicy(overlaps=True, step_seconds=lambda rows, tokens: asked.append(tokens))
    assert not policy.pays(dict.fromkeys(range(200), 5), 256)
    assert not asked  # nor are graphs captured for that
    assert JumpPolicy(overlaps=False).pays(dict.fromkeys(range(200), 5), 256)


def test_rows_draw_their_forced_text_until_the_device_is_ready() -> None:
    asked: list[tuple[int, int]] = []

    def seconds(num_rows: int, num_tokens: int) -> float | None:
        asked.append((num_rows, num_tokens))
        return None

    assert not JumpPolicy(overlaps=True, step_seconds=seconds).pays({0: 2, 3: 5}, 16)
    assert asked[0] == (16, 23)


class TimedExecutor(ScriptedExecutor):
    """Its steps take `seconds`, it says."""

    seconds = 0.004

    def step_seconds(self, num_rows: int, num_tokens: int) -> float | None:
        return self.seconds


RUNS = [f'{{"first_key":{a},"second_key":{b},"third_key":{c}}}' for a in "ab" for b in "ab" for c in "ab"]


@pytest.mark.parametrize("rows", [1, 5])
def test_turns_change_no_text_and_take_fewer_steps(rows: int) -> None:
    """Long steps beside a host that is quick: the engine takes turns, and each run costs its row no step."""
    found: dict[float, list[tuple[int, ...]]] = {}
    steps: dict[float, int] = {}
    for seconds in (0.0, 10.0):  # nothing is known of steps; they are worth any turn
        executor = TimedExecutor(overlaps=True)
        executor.seconds = seconds
        harness = Harness(executor=executor, overlap=True)
        for i in range(20):
            ids = [harness.add(f"{i} {j}", grammar=choice(*RUNS)) for j in range(rows)]
            harness.run()
            found.setdefault(seconds, []).extend(tuple(harness.output(r).token_ids) for r in ids)
        steps[seconds] = harness.core.metrics.steps
    assert found[0.0] == found[10.0]
    assert steps[10.0] < steps[0.0]


def test_rows_without_a_grammar_ask_for_no_graph_of_forced_text() -> None:
    asked: list[tuple[int, int]] = []

    class Asked(TimedExecutor):
        def step_seconds(self, num_rows: int, num_tokens: int) -> float | None:
            asked.append((num_rows, num_tokens))
            return None

    harness = Harness(executor=Asked(overlaps=True), overlap=True)
    for i in range(3):
        harness.add(f"free {i}", max_tokens=4, logprobs=1, ignore_eos=True)
    harness.run()
    assert not asked


def test_rows_without_a_grammar_lose_a_small_share_of_their_time_to_the_jumps_of_others() -> None:
    now = [0.0]
    seconds = {32: 0.0010, 64: 0.0012}
    policy = JumpPolicy(
        overlaps=True, step_seconds=lambda rows, tokens: seconds[32 if tokens <= 32 else 64], clock=lambda: now[0]
    )
    jumps = 0
    for _ in range(2000):
        now[0] += 0.001
        jumps += policy.pays({0: 10, 1: 10}, 32, free=True)
    assert 0.005 < jumps * 0.0002 / now[0] < 0.02
    assert all(policy.pays({0: 10, 1: 10}, 32) for _ in range(100)), "alone they jump whenever it pays"
