"""Attention of small steps that reads shared prefixes once: the plan's place on the GPU, and the launches.

The plan stays where it is until other rows share other prefixes, and the kernels read all its numbers on the device:
graphs captured for one plan serve every plan with the same key.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import triton

from sglite.runtime.batch import Batch, IntArray
from sglite.runtime.device.base import AttentionShape, KVCache
from sglite.runtime.device.cuda.inputs import MAX_SMALL, CudaForwardBatch, PinnedRing, Sections, fill
from sglite.runtime.device.cuda.kernels.tree_attention import (
    merge_kernel,
    prefix_attention_kernel,
    suffix_attention_kernel,
)
from sglite.runtime.device.cuda.tree_plan import (
    BLOCK_T,
    ITEM_WORDS,
    MEASURED,
    MOST_ITEMS,
    SHARE_WORDS,
    Group,
    TreeKey,
    TreePlan,
    TreeShape,
    plan_tree,
)
from sglite.runtime.device.inputs import HostInputs


def prefix_tile(block_m: int) -> tuple[int, int]:
    """Pipeline stages, warps."""
    return (7, 4) if block_m == 64 else (5, 8)


def suffix_tile() -> tuple[int, int, int]:
    """Tokens a tile, pipeline stages, warps. Small, so that programs fit beside those of the prefix kernel."""
    return 32, 2, 1


class TreeAttention:
    """`costs`: by which it is decided what a step reads once."""

    def __init__(self, shape: AttentionShape, cache: KVCache, *, pdl: bool) -> None:
        device = cache.k[0].device
        self._shape = shape
        self._cache = cache
        self._scale = shape.scale * math.log2(math.e)
        self._pdl = pdl
        self.costs = MEASURED
        self._tree_shape = TreeShape(
            kv_heads=shape.num_kv_heads,
            queries=shape.num_heads // shape.num_kv_heads,
            kv_bytes=shape.bytes_per_token // shape.num_layers,
            processors=torch.cuda.get_device_properties(device).multi_processor_count,
        )
        sizes = {"members": MAX_SMALL, "shares": MAX_SMALL * SHARE_WORDS, "items": MOST_ITEMS * ITEM_WORDS}
        self._sections = Sections(sizes)
        self._buffer = torch.zeros(self._sections.words, dtype=torch.int32, device=device)
        self._views = self._sections.views(self._buffer)
        self._ring = PinnedRing(self._sections.words)
        self._planned: Batch | None = None
        self._plan: TreePlan | None = None

    def plan(self, batch: Batch, inputs: HostInputs) -> tuple[TreeKey | None, IntArray]:
        """For a small step: the key (None: nothing is read once), and how many cached tokens each row of the kernels
        reads by itself."""
        if not batch.shared_prefixes:
            return None, inputs.positions
        if self._planned is None or not _same_rows(self._planned, batch):
            self._planned = batch
            self._plan = plan_tree(token_groups(batch), inputs.token_rows, self._tree_shape, costs=self.costs)
            if self._plan is not None:
                self._send(self._plan)
        plan = self._plan
        return (None, inputs.positions) if plan is None else (plan.key, inputs.positions - plan.prefixes)

    def _send(self, plan: TreePlan) -> None:
        pinned, host = self._ring.take()
        host[:] = 0
        fill(host, self._sections, members=plan.members, shares=plan.shares.ravel(), items=plan.items.ravel())
        self._buffer.copy_(pinned, non_blocking=True)
        self._ring.sent()

    def attend(self, layer: int, q: torch.Tensor, batch: CudaForwardBatch) -> torch.Tensor:
        """q: [N, num_heads, head_dim], rotated; new keys and values are in place -> [N, num_heads * head_dim]."""
        assert batch.key is not None and batch.key.tree is not None
        shape, splits, views = self._shape, batch.key.splits, self._views
        block_m = batch.key.tree.block_m
        prefix_part, prefix_stat = self._prefixes(layer, q, batch, batch.key.tree)
        part, stat = self._suffixes(layer, q, batch, splits)
        out = q.new_empty(q.shape[0], shape.num_heads * shape.head_dim)
        group = self._tree_shape.queries
        heads = triton.next_power_of_2(group)
        chunk = max(1, 32 // heads)
        merge_kernel[(q.shape[0], shape.num_kv_heads)](
            batch.positions, views["shares"], part, stat, prefix_part, prefix_stat, out,
            HKV=shape.num_kv_heads, GROUP=group, HEADS=heads, D=shape.head_dim, BLOCK_M=block_m, SPLITS=splits,
            OWN=min(splits, chunk), CHUNK=chunk, PDL=self._pdl, num_warps=1, launch_pdl=self._pdl,
        )  # fmt: skip
        return out

    def _prefixes(
        self, layer: int, q: torch.Tensor, batch: CudaForwardBatch, key: TreeKey
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and log2 of the normaliser of each item's queries."""
        shape, table, views = self._shape, batch.page_table, self._views
        part = q.new_empty(key.items, shape.num_kv_heads, key.block_m, shape.head_dim)
        stat = torch.empty(part.shape[:-1], dtype=torch.float32, device=part.device)
        stages, warps = prefix_tile(key.block_m)
        prefix_attention_kernel[(key.items, shape.num_kv_heads)](
            q, self._cache.k[layer], self._cache.v[layer], table, views["members"], views["items"], part, stat,
            table.stride(0), self._scale,
            HKV=shape.num_kv_heads, GROUP=self._tree_shape.queries, D=shape.head_dim, BLOCK_M=key.block_m,
            BLOCK_T=BLOCK_T, PAGE_SIZE=batch.page_size, STAGES=stages, PDL=self._pdl, num_warps=warps,
            launch_pdl=self._pdl,
        )  # fmt: skip
        return part, stat

    def _suffixes(
        self, layer: int, q: torch.Tensor, batch: CudaForwardBatch, splits: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same of each part of each row's suffix."""
        shape, table, group = self._shape, batch.page_table, self._tree_shape.queries
        part = q.new_empty(q.shape[0], splits, shape.num_heads, shape.head_dim)
        stat = torch.empty(part.shape[:-1], dtype=torch.float32, device=part.device)
        block, stages, warps = suffix_tile()
        suffix_attention_kernel[(q.shape[0], splits, shape.num_kv_heads)](
            q, self._cache.k[layer], self._cache.v[layer], table, batch.rows, batch.positions, self._views["shares"],
            part, stat, table.stride(0), self._scale,
            HKV=shape.num_kv_heads, GROUP=group, BLOCK_G=max(16, triton.next_power_of_2(group)), D=shape.head_dim,
            BLOCK_T=block, SPLITS=splits, PAGE_SIZE=batch.page_size, STAGES=stages, PDL=self._pdl, num_warps=warps,
            launch_pdl=self._pdl,
        )  # fmt: skip
        return part, stat


def token_groups(batch: Batch) -> list[Group]:
    """The batch's groups of rows as groups of new tokens, which are the rows of the kernels of small steps."""
    if batch.num_tokens == len(batch.rows):
        return [Group(length, np.array(rows, np.int32)) for length, rows in batch.shared_prefixes]
    ends = np.cumsum(batch.num_new, dtype=np.int32)
    begins = ends - batch.num_new
    return [
        Group(length, np.concatenate([np.arange(begins[row], ends[row], dtype=np.int32) for row in rows]))
        for length, rows in batch.shared_prefixes
    ]


def _same_rows(planned: Batch, batch: Batch) -> bool:
    """The same groups of the same rows, with as many new tokens each."""
    return (
        (planned.shared_prefixes is batch.shared_prefixes or planned.shared_prefixes == batch.shared_prefixes)
        and np.array_equal(planned.rows, batch.rows)
        and np.array_equal(planned.num_new, batch.num_new)
    )
