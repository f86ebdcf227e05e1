from __future__ import annotations

from typing import Any

import pytest
import torch

from sglite.errors import InvalidRequest
from sglite.runtime.config import EngineConfig
from sglite.runtime.device.base import AttentionShape
from sglite.runtime.executor.kv_cache import num_pages

SHAPE = AttentionShape(num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, scale=0.25, dtype=torch.float32)
GIB = 1 << 30


def pages(free: int = GIB, on_cpu: bool = True, **options: Any) -> int:
    return num_pages(EngineConfig(**options), SHAPE, free=free, on_cpu=on_cpu, max_model_len=128)


@pytest.mark.parametrize(("name", "value"), [("num_pages", 2**31 - 1), ("kv_memory", 1000.0)])
def test_more_kv_than_the_machine_has_free_is_refused_by_the_option(name: str, value: float) -> None:
    with pytest.raises(InvalidRequest, match=rf"{name}=.* GiB of KV, and 1\.0 GiB are free") as caught:
        pages(**{name: value})
    assert caught.value.param == name


def test_what_fits_is_taken_as_asked() -> None:
    assert pages(num_pages=100) == 100
    assert pages(kv_memory=0.5) == GIB // 2 // SHAPE.bytes_per_token
    assert pages(free=0, on_cpu=False, num_pages=100) == 100  # a GPU's own allocator says it
