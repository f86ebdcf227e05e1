from __future__ import annotations

from sglite.runtime.scheduler.jumps import JumpPolicy


def test_a_few_rows_jump_whenever_a_step_is_saved() -> None:
    policy = JumpPolicy(overlaps=True)
    assert policy.pays({0: 1}, 1)
    assert policy.pays({2: 1}, 8)
    assert not policy.pays({}, 1)


def test_in_a_batch_the_steps_saved_must_outweigh_a_dearer_step() -> None:
    policy = JumpPolicy(overlaps=True)
    assert not policy.pays({0: 3}, 32)
    assert policy.pays({0: 3, 5: 1}, 32)


def test_many_rows_save_nothing_where_the_device_computes_all_the_time() -> None:
    saved = dict.fromkeys(range(200), 5)
    assert not JumpPolicy(overlaps=True).pays(saved, 256)
    assert JumpPolicy(overlaps=False).pays(saved, 256)


def test_rows_wait_for_no_preparation_of_the_device_but_a_single_stream_may() -> None:
    policy = JumpPolicy(overlaps=True, ready=lambda: False)
    assert policy.pays({0: 2}, 1)
    assert not policy.pays(dict.fromkeys(range(16), 5), 16)
