from __future__ import annotations

import random

import numpy as np
import pytest

from sglite.runtime.batch import NO_MASK
from sglite.runtime.scheduler.rows import _mask_slots


@pytest.mark.parametrize("seed", range(30))
def test_each_masked_draw_has_a_slot_of_its_own_and_the_others_none(seed: int) -> None:
    rng = random.Random(seed)
    rows = rng.randint(1, 9)
    drafts = np.array([rng.choice((0, 0, 2)) if seed % 3 == 0 else 0 for _ in range(rows)], np.int32)
    logits = 1 + drafts
    if seed % 3 == 1:
        logits[rng.randrange(rows)] = 0  # a chunk of a prompt
    masks = np.array([rng.random() < 0.6 for _ in range(rows)]) & (logits > 0)
    indices, first_slots, slots = _mask_slots(masks, logits, drafts)
    masked = list(zip(indices.tolist(), first_slots.tolist(), strict=True))
    expected, first = [], 0
    for i in range(rows):
        draws = 1 + int(drafts[i])
        expected += list(range(first, first + draws)) if masks[i] else [NO_MASK] * int(logits[i])
        if masks[i]:
            assert (i, first) in masked
            first += draws
    assert slots.tolist() == expected
    assert len(masked) == masks.sum()
    assert slots.dtype == indices.dtype == first_slots.dtype == np.int32
