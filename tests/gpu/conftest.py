"""Kernels run on the GPU where there is one (`pytest -m gpu tests/gpu`), else in Triton's interpreter: with fewer and
smaller shapes, and still slow (`pytest -m slow tests/gpu`).

The interpreter is chosen when a kernel module is imported, hence before any test module here is.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
if "PYTEST_XDIST_WORKER" in os.environ:  # the CPU engines of many workers, each with a thread a core, starve each other
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _large_steps_begin_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models have short rows, of which hardly any are more than a small step."""
    if ON_GPU:
        monkeypatch.setattr("sglite.runtime.device.cuda.device.MAX_SMALL", 512)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and item.get_closest_marker("gpu") is None:
            item.add_marker("gpu" if ON_GPU else "slow")
