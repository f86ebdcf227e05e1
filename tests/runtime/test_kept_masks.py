"""Masks that rows have in common are sent once and then named; what is drawn stays the same."""

from __future__ import annotations

import pytest

from tests.fakes.executor import ScriptedExecutor
from tests.fakes.matcher import LoopFiller, SharingFiller, choice
from tests.runtime.harness import Harness

TEXTS = choice(*(f"{first}{second}{third}" for first in "abc" for second in "xyz" for third in "123"))
PROMPTS = [f"prompt {i}" for i in range(12)]


def answers(filler: LoopFiller, kept: int, *, overlap: bool) -> list[object]:
    """What each row said."""
    executor = ScriptedExecutor(num_pages=4096, max_rows=32, max_len=512, kept_mask_rows=kept)
    harness = Harness(executor=executor, filler=filler, overlap=overlap)
    ids = [harness.add(prompt, grammar=TEXTS, jump_forward=False) for prompt in PROMPTS]
    harness.run()
    said: list[object] = [(harness.output(i).token_ids, harness.output(i).finish_reason) for i in ids]
    return said


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
@pytest.mark.parametrize("kept", [0, 1, 2, 64])
def test_shared_masks_change_no_token_however_few_are_kept(overlap: bool, kept: int) -> None:
    want = answers(LoopFiller(), 0, overlap=overlap)
    got = answers(SharingFiller(), kept, overlap=overlap)
    assert got == want


def test_a_mask_that_is_kept_is_not_sent_again() -> None:
    executor = ScriptedExecutor(num_pages=4096, max_rows=32, max_len=512, kept_mask_rows=64)
    harness = Harness(executor=executor, filler=SharingFiller())
    for prompt in PROMPTS:
        harness.add(prompt, grammar=TEXTS, jump_forward=False)
    harness.run()
    steps = len(executor.batches)
    for prompt in PROMPTS:
        harness.add(prompt + " again", grammar=TEXTS, jump_forward=False)
    harness.run()
    assert len(executor.batches) > steps
    for batch in executor.batches[steps:]:
        assert not batch.kept_masks
        assert (batch.mask_slots[batch.mask_slots >= 0] >= executor.mask_rows).all()


def test_stop_ids_that_are_forbidden_for_a_while_are_one_mask() -> None:
    executor = ScriptedExecutor(num_pages=4096, max_rows=32, max_len=512, kept_mask_rows=4)
    harness = Harness(executor=executor)
    for prompt in PROMPTS:
        harness.add(prompt, min_tokens=5, max_tokens=8)
    harness.run()
    assert sum(len(batch.kept_masks) for batch in executor.batches) == 1
