"""FlashInfer's ragged attention over the paged cache: one plan a step on the host, one run a layer."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
import triton

from sglite.runtime.device.base import AttentionShape, KVCache
from sglite.runtime.device.cuda.inputs import CudaForwardBatch
from sglite.runtime.device.cuda.kernels.elementwise import gather_pages_kernel

_WORKSPACE = 384 << 20  # bytes
_PLANS = 3  # in flight: the copy of a plan to the device may still be queued when the host makes the next one
_LONG_ROWS = 256  # mean new tokens a row from which fa3 is ahead of fa2


class RaggedPlanner:
    def __init__(self, shape: AttentionShape, cache: KVCache, device: torch.device) -> None:
        self._shape = shape
        self._device = device
        self._page_size = cache.page_size
        paged = (-1, cache.page_size, shape.num_kv_heads, shape.head_dim)
        self._layers = [(k.view(paged), v.view(paged)) for k, v in zip(cache.k, cache.v, strict=True)]
        self._workspace: torch.Tensor | None = None
        self._wrappers: dict[str, Any] = {}
        self._hopper = torch.cuda.get_device_capability(device)[0] == 9
        self._current: Any = None

    def plan(self, batch: CudaForwardBatch) -> None:
        plan, size = batch.batch, self._page_size
        lengths = plan.starts + plan.num_new
        num_pages = -(-lengths // size)
        indptr = _offsets(num_pages)
        pages = torch.empty(int(indptr[-1]), dtype=torch.int32, device=self._device)
        ends = indptr.to(self._device, non_blocking=True)
        blocks = min(64, triton.cdiv(int(num_pages.max()), 1024))
        gather_pages_kernel[(len(lengths), blocks)](
            batch.page_table, batch.rows, ends, pages, batch.page_table.stride(0), BLOCK=1024
        )
        shape = self._shape
        self._current = self._next_wrapper(
            "fa3" if self._hopper and plan.num_tokens >= _LONG_ROWS * len(lengths) else "fa2"
        )
        self._current.plan(
            _offsets(plan.num_new),
            indptr,
            pages,
            torch.from_numpy((lengths - (num_pages - 1) * size).astype(np.int32)),
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            size,
            causal=True,
            sm_scale=shape.scale,
            q_data_type=shape.dtype,
            kv_data_type=shape.dtype,
            max_token_per_sequence=int(plan.num_new.max()),
        )

    def run(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """q: [T, num_heads, head_dim] -> the same shape."""
        out = torch.empty_like(q)  # one that FlashInfer makes is filled with zeros first
        return self._current.run(q, self._layers[layer], out=out)

    def _next_wrapper(self, backend: str) -> Any:
        if self._workspace is None:
            self._workspace = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=self._device)
        if backend not in self._wrappers:
            import flashinfer  # when it is needed: it takes longer to import than the rest of a small engine to start

            make = flashinfer.BatchPrefillWithPagedKVCacheWrapper
            wrappers = [make(self._workspace, "NHD", backend=backend) for _ in range(_PLANS)]
            self._wrappers[backend] = itertools.cycle(wrappers)
        return next(self._wrappers[backend])


def _offsets(counts: np.ndarray) -> torch.Tensor:
    """0 and the running sums: pinned int32[len(counts) + 1]."""
    offsets = torch.zeros(len(counts) + 1, dtype=torch.int32, pin_memory=True)
    np.cumsum(counts, out=offsets.numpy()[1:])
    return offsets
