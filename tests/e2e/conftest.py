"""Engines over the real small model, one per way of running it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import sglite as sgl


@pytest.fixture(scope="session")
def engine() -> Iterator[sgl.Engine]:
    with sgl.Engine(model="smollm2", max_rows=32, check_invariants=True) as made:
        yield made
