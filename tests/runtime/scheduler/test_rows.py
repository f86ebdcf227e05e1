from __future__ import annotations

import random

import numpy as np
import pytest

from sglite.runtime.scheduler import rows
from sglite.runtime.scheduler.rows import RowTable


@pytest.mark.parametrize("seed", range(5))
def test_runs_enter_one_by_one_as_all_at_once(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    chosen = rng.sample(range(16), 7)
    runs = [tuple(rng.randrange(100) for _ in range(rng.randint(1, 5))) for _ in chosen]
    left: list[tuple[list[bool], np.ndarray, np.ndarray]] = []
    for few in (0, 99):
        monkeypatch.setattr(rows, "_FEW", few)
        table = RowTable(16, 64, 1)
        numbers = np.random.default_rng(seed)
        table.length[:] = numbers.integers(1, 30, 16)
        table.in_flight[:] = numbers.integers(1, 3, 16)
        table.flags[:] = rows.PLAIN | rows.MATCHER
        ahead = table.advance_by(chosen, runs)
        left.append((ahead.tolist(), table.numbers, table.tokens))
    assert left[0][0] == left[1][0]
    assert np.array_equal(left[0][1], left[1][1])
    assert np.array_equal(left[0][2], left[1][2])
