"""FlashInfer's attention for large steps: one plan a step on the host, one run a layer.

Rows with something in the cache read keys and values through their pages. Where no row has, which is what a prompt's
first step looks like, the new keys and values are all there is: they are read where they were just made, in order,
which lets fa3 fetch them with the bulk copy engine.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import triton

from sglite.runtime.device.base import AttentionShape, KVCache, RowTables
from sglite.runtime.device.cuda.inputs import CudaForwardBatch, send_large, zeros
from sglite.runtime.device.cuda.kernels.elementwise import gather_pages_kernel
from sglite.runtime.device.inputs import host_inputs

_WORKSPACE = 384 << 20  # bytes
_SMALL_WORKSPACE = 64 << 20
_PLANS = 3  # in flight: the copy of a plan to the device may still be queued when the host makes the next one
_LONG_ROWS = 256  # mean new tokens a row from which fa3 is ahead of fa2


class RaggedPlanner:
    """`workspace`: bytes for FlashInfer."""

    def __init__(
        self, shape: AttentionShape, cache: KVCache, device: torch.device, *, workspace: int = _WORKSPACE
    ) -> None:
        self._shape = shape
        self._device = device
        self._workspace_bytes = workspace
        self._page_size = cache.page_size
        paged = (-1, cache.page_size, shape.num_kv_heads, shape.head_dim)
        self._layers = [(k.view(paged), v.view(paged)) for k, v in zip(cache.k, cache.v, strict=True)]
        self._workspace: torch.Tensor | None = None
        self._wrappers: dict[tuple[str, bool], Any] = {}
        self._hopper = torch.cuda.get_device_capability(device)[0] == 9
        self._current: Any = None
        self.from_pages = True  # of the step that was planned last

    def plan(self, batch: CudaForwardBatch) -> None:
        plan, shape = batch.batch, self._shape
        long_rows = self._hopper and plan.num_tokens >= _LONG_ROWS * len(plan.rows)
        self.from_pages = not long_rows or bool(plan.starts.any())
        self._current = self._next_wrapper("fa3" if long_rows else "fa2")
        if self.from_pages:
            self._plan_pages(batch)
            return
        indptr = _offsets(plan.num_new)
        self._current.plan(
            indptr,
            indptr,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            causal=True,
            sm_scale=shape.scale,
            q_data_type=shape.dtype,
            kv_data_type=shape.dtype,
        )

    def _plan_pages(self, batch: CudaForwardBatch) -> None:
        plan, size = batch.batch, self._page_size
        lengths = plan.starts + plan.num_new
        num_pages = -(-lengths // size)
        indptr = _offsets(num_pages)
        # Zeros: where kernels are only compiled nobody gathers, and FlashInfer reads page 0.
        pages = torch.zeros(int(indptr[-1]), dtype=torch.int32, device=self._device)
        ends = indptr.to(self._device, non_blocking=True)
        blocks = min(64, triton.cdiv(int(num_pages.max()), 1024))
        gather_pages_kernel[(len(lengths), blocks)](
            batch.page_table, batch.rows, ends, pages, batch.page_table.stride(0), BLOCK=1024
        )
        shape = self._shape
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

    def run(self, layer: int, q: torch.Tensor, new: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
        """q: [T, num_heads, head_dim] -> the same shape. `new`: the step's keys and values, [T, num_kv_heads,
        head_dim] each, unless they are read `from_pages`."""
        out = torch.empty_like(q)  # one that FlashInfer makes is filled with zeros first
        if new is None:
            return self._current.run(q, self._layers[layer], out=out)
        return self._current.run(q, *new, out=out)

    def _next_wrapper(self, backend: str) -> Any:
        if self._workspace is None:
            self._workspace = torch.zeros(self._workspace_bytes, dtype=torch.uint8, device=self._device)
        key = backend, self.from_pages
        if key not in self._wrappers:
            import flashinfer  # when it is needed: it takes longer to import than the rest of a small engine to start

            paged, ragged = (
                flashinfer.BatchPrefillWithPagedKVCacheWrapper,
                flashinfer.BatchPrefillWithRaggedKVCacheWrapper,
            )
            make = paged if self.from_pages else ragged
            wrappers = [make(self._workspace, "NHD", backend=backend) for _ in range(_PLANS)]
            self._wrappers[key] = itertools.cycle(wrappers)
        return next(self._wrappers[key])


@torch.inference_mode()
def load_attention(shape: AttentionShape, device: torch.device, *, page_size: int) -> None:
    """Import FlashInfer and run each of the kernels that `shape` needs once, which loads it. May have a thread of its
    own beside steps."""
    one_layer = replace(shape, num_layers=1)
    slots, new = 2 * _LONG_ROWS, _LONG_ROWS
    size = (slots * page_size, shape.num_kv_heads, shape.head_dim)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        cache = KVCache(*([torch.zeros(size, dtype=shape.dtype, device=device)] for _ in range(2)), page_size)
        planner = RaggedPlanner(one_layer, cache, device, workspace=_SMALL_WORKSPACE)
        tables = RowTables(
            np.zeros((2, slots), np.int32),
            torch.zeros((2, slots), dtype=torch.int32, device=device),
            torch.zeros(2, dtype=torch.int32, device=device),
            page_size,
        )
        q = torch.zeros(2 * new, shape.num_heads, shape.head_dim, dtype=shape.dtype, device=device)
        k = torch.zeros(2 * new, shape.num_kv_heads, shape.head_dim, dtype=shape.dtype, device=device)
        for start, tokens in ((0, new), (1, new), (1, 1)):  # all prompts are new, behind cached ones, few tokens
            batch = zeros(rows=2, tokens=tokens, start=start)
            planner.plan(send_large(batch, host_inputs(batch, tables.host_page_table, page_size), tables))
            planner.run(0, q[: 2 * tokens], None if planner.from_pages else (k, k))
        torch.cuda.current_stream(device).synchronize()


def _offsets(counts: np.ndarray) -> torch.Tensor:
    """0 and the running sums: pinned int32[len(counts) + 1]."""
    offsets = torch.zeros(len(counts) + 1, dtype=torch.int32, pin_memory=True)
    np.cumsum(counts, out=offsets.numpy()[1:])
    return offsets
