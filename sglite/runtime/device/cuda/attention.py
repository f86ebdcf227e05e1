"""Paged attention on a GPU: Triton for small steps, FlashInfer for large ones.

Small steps read lengths and pages on the device and need no plan. Large ones are planned on the host: FlashInfer's
fa3 kernels where the rows have many new tokens (1.6 times faster at 4 rows of 4,096), fa2 where they have few (3.5
times faster at 64 rows of 16 on 8,192 cached). Measured on an H200; see benchmarks/gpu.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton

from sglite.runtime.device.base import AttentionLayer, AttentionShape, ForwardBatch, KVCache
from sglite.runtime.device.cuda.inputs import MAX_SMALL, CudaForwardBatch
from sglite.runtime.device.cuda.kernels.attention import decode_attention_kernel, norm_rope_append_kernel
from sglite.runtime.device.cuda.kernels.chunk_attention import chunk_attention_kernel
from sglite.runtime.device.cuda.planner import RaggedPlanner
from sglite.runtime.device.cuda.tree import TreeAttention

_MAX_SPLITS = 64
_ONE_BY_ONE = 64  # new tokens of a small step up to which each reads its row by itself: more programs, shorter ones,
_SMALL_HEAD = 64  # which pays where heads are larger than this
_FEW_QUERIES = 8  # new tokens of a large step for each whose output is read, from which the others are left out


def choose_splits(tokens: int, kv_heads: int, longest: int) -> int:
    """Into how many parts the KV of each of `tokens` rows of up to `longest` cached tokens is cut.

    Enough programs to load the GPU, but no part under 16 tokens (128 where rows alone give some parallelism).
    """
    programs = tokens * kv_heads
    if programs >= 256 and longest <= 1024 or programs >= 512:
        return 1
    wanted = max(1, (528 if longest > 1024 else 256) // programs)
    smallest = 16 if programs < 64 else 128
    useful = max(1, triton.cdiv(longest, smallest))
    return min(_MAX_SPLITS, triton.next_power_of_2(wanted), triton.next_power_of_2(useful))


class CudaAttention:
    """bf16 and fp16, head sizes that are powers of two."""

    shares_prefix_reads = True

    def __init__(self, shape: AttentionShape, cache: KVCache, *, max_tokens: int, pdl: bool) -> None:
        device = cache.k[0].device
        self._shape = shape
        self._cache = cache
        self._pdl = pdl
        self._planner = RaggedPlanner(shape, cache, device)
        self._large: CudaForwardBatch | None = None
        # A split launch has fewer than 512 programs of the unsplit kind or few rows: tokens * splits stays below this.
        parts = max(_MAX_SPLITS, 2048 // shape.num_kv_heads) * 2
        heads = shape.num_heads
        self._part = torch.empty(parts * heads * shape.head_dim, dtype=torch.float32, device=device)
        self._stat = torch.empty(parts * heads * 2, dtype=torch.float32, device=device)
        self._count = torch.zeros(max_tokens * shape.num_kv_heads, dtype=torch.int32, device=device)
        self.tree = TreeAttention(shape, cache, pdl=pdl)

    def plan(self, batch: ForwardBatch) -> None:
        assert isinstance(batch, CudaForwardBatch)
        if batch.key is None:
            self._planner.plan(batch)

    def attend(self, layer: AttentionLayer, qkv: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        assert isinstance(batch, CudaForwardBatch)
        if batch.key is None:
            return self._attend_large(layer, qkv, batch)
        if batch.key.tree is not None:
            q = qkv.new_empty(qkv.shape[0], self._shape.num_heads, self._shape.head_dim)
            self._append(layer, qkv, batch, q, None)
            return self.tree.attend(layer.number, q, batch)
        if batch.key.decode:
            splits = batch.key.splits
            return self._attend_tokens(layer, qkv, batch, batch.rows, batch.starts, splits=splits, append=True)
        self._append(layer, qkv, batch, None, None)
        splits = batch.key.splits
        if qkv.shape[0] <= _ONE_BY_ONE and self._shape.head_dim > _SMALL_HEAD:
            return self._attend_tokens(layer, qkv, batch, batch.rows, batch.starts, splits=splits, append=False)
        return self._attend_chunks(layer, qkv, batch, splits=splits)

    def leaves_out(self, batch: ForwardBatch) -> bool:
        """See SelectiveAttention: steps whose prompts are long."""
        assert isinstance(batch, CudaForwardBatch)
        wanted = len(batch.batch.mask_slots)
        return batch.key is None and wanted <= MAX_SMALL and _FEW_QUERIES * wanted <= batch.batch.num_tokens

    def keys_values(self, weight: torch.Tensor) -> torch.Tensor:
        return weight[self._shape.num_heads * self._shape.head_dim :]

    def append(self, layer: AttentionLayer, keys_values: torch.Tensor, batch: ForwardBatch) -> None:
        assert isinstance(batch, CudaForwardBatch)
        self._append(layer, keys_values, batch, None, None, query_heads=0)

    def attend_selected(self, layer: AttentionLayer, qkv: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        assert isinstance(batch, CudaForwardBatch)
        rows = batch.token_rows.index_select(0, batch.logits_index)
        positions = batch.positions.index_select(0, batch.logits_index)
        longest = int((batch.batch.starts + batch.batch.num_new).max())
        splits = choose_splits(max(1, len(rows)), self._shape.num_kv_heads, longest)
        return self._attend_tokens(layer, qkv, batch, rows, positions, splits=splits, append=False)

    def _attend_large(self, layer: AttentionLayer, qkv: torch.Tensor, batch: CudaForwardBatch) -> torch.Tensor:
        shape, tokens = self._shape, qkv.shape[0]
        q = qkv.new_empty(tokens, shape.num_heads, shape.head_dim)
        if self._planner.from_pages:
            self._append(layer, qkv, batch, q, None)
            return self._planner.run(layer.number, q, None).flatten(1)
        k = qkv.new_empty(tokens, shape.num_kv_heads, shape.head_dim)
        self._append(layer, qkv, batch, q, k)
        v = qkv.view(tokens, -1, shape.head_dim)[:, -shape.num_kv_heads :]
        return self._planner.run(layer.number, q, (k, v)).flatten(1)

    def _append(
        self,
        layer: AttentionLayer,
        qkv: torch.Tensor,
        batch: CudaForwardBatch,
        q: torch.Tensor | None,
        k: torch.Tensor | None,
        *,
        query_heads: int | None = None,
    ) -> None:
        """`q`, `k`: where the rotated queries and, beside their slots, the rotated keys go. `query_heads`: those that
        qkv has before the keys' (default: the model's)."""
        shape, tokens = self._shape, qkv.shape[0]
        block = 16 if tokens > 64 else 2
        heads = 2 * shape.num_kv_heads + (0 if q is None else shape.num_heads)
        q_norm, k_norm = layer.norms or (None, None)
        norm_rope_append_kernel[(heads, triton.cdiv(tokens, block))](
            qkv, qkv if q_norm is None else q_norm.weight, qkv if k_norm is None else k_norm.weight, layer.cos_sin,
            batch.positions, batch.slots, qkv if q is None else q, qkv if k is None else k, self._cache.k[layer.number],
            self._cache.v[layer.number], tokens, 0.0 if q_norm is None else q_norm.eps,
            HQ=shape.num_heads if query_heads is None else query_heads, HKV=shape.num_kv_heads, D=shape.head_dim,
            BLOCK_T=block, QK_NORM=layer.norms is not None, QUERIES=q is not None, KEYS=k is not None, PDL=self._pdl,
            launch_pdl=self._pdl,
        )  # fmt: skip

    def _attend_tokens(
        self,
        layer: AttentionLayer,
        qkv: torch.Tensor,
        batch: CudaForwardBatch,
        rows: torch.Tensor,
        positions: torch.Tensor,
        *,
        splits: int,
        append: bool,
    ) -> torch.Tensor:
        """Each token by itself, the lengths read on the device. rows, positions: int32[N] of the tokens of qkv."""
        shape, tokens = self._shape, qkv.shape[0]
        out = qkv.new_empty(tokens, shape.num_heads * shape.head_dim)
        if not tokens:
            return out
        block, stages, warps = _tile(tokens * shape.num_kv_heads, splits)
        q_norm, k_norm = layer.norms or (None, None)
        group = shape.num_heads // shape.num_kv_heads
        decode_attention_kernel[(tokens, splits, shape.num_kv_heads)](
            qkv, qkv if q_norm is None else q_norm.weight, qkv if k_norm is None else k_norm.weight, layer.cos_sin,
            self._cache.k[layer.number], self._cache.v[layer.number], batch.page_table, rows, positions, batch.slots,
            out, self._part, self._stat, self._count, batch.page_table.stride(0), 0.0 if q_norm is None else q_norm.eps,
            shape.scale * math.log2(math.e),
            HKV=shape.num_kv_heads, GROUP=group, BLOCK_G=max(16, triton.next_power_of_2(group)), D=shape.head_dim,
            BLOCK_T=block, SPLITS=splits, PAGE_SIZE=batch.page_size, STAGES=stages, QK_NORM=layer.norms is not None,
            APPEND=append, PDL=self._pdl, num_warps=warps, launch_pdl=self._pdl,
        )  # fmt: skip
        return out

    def _attend_chunks(
        self, layer: AttentionLayer, qkv: torch.Tensor, batch: CudaForwardBatch, *, splits: int
    ) -> torch.Tensor:
        """Neighbouring new tokens of a row together; their keys and values are in place."""
        shape, tokens = self._shape, qkv.shape[0]
        out = qkv.new_empty(tokens, shape.num_heads * shape.head_dim)
        q_norm = None if layer.norms is None else layer.norms[0]
        group = shape.num_heads // shape.num_kv_heads
        tile = chunk_tile(group)
        block, stages, warps = (32, 2, 2) if splits == 1 and tokens * shape.num_kv_heads >= 1024 else (64, 3, 4)
        chunk_attention_kernel[(tokens, splits, shape.num_kv_heads)](
            qkv, qkv if q_norm is None else q_norm.weight, layer.cos_sin, self._cache.k[layer.number],
            self._cache.v[layer.number], batch.page_table, batch.rows, batch.positions, out, self._part, self._stat,
            self._count, batch.page_table.stride(0), 0.0 if q_norm is None else q_norm.eps,
            shape.scale * math.log2(math.e),
            HKV=shape.num_kv_heads, GROUP=group, TOKENS=tile.tokens, BLOCK_M=tile.block_m, D=shape.head_dim,
            BLOCK_T=block, SPLITS=splits, CHUNK=2, LOOK=triton.next_power_of_2(tokens), PAGE_SIZE=batch.page_size,
            STAGES=stages, QK_NORM=layer.norms is not None, PDL=self._pdl, num_warps=warps, launch_pdl=self._pdl,
        )  # fmt: skip
        return out


@dataclass(frozen=True, slots=True)
class ChunkTile:
    tokens: int  # new tokens of a row that a program takes
    block_m: int  # their queries, rounded up


def chunk_tile(group: int) -> ChunkTile:
    """`group`: query heads a KV head. As many queries as the tensor cores take at least."""
    block_m = max(16, triton.next_power_of_2(group))
    return ChunkTile(block_m // group, block_m)


def _tile(programs: int, splits: int) -> tuple[int, int, int]:
    """Tokens a tile, pipeline stages, warps."""
    if splits == 1:
        return (32, 2, 1) if programs >= 1024 else (64, 3, 4)
    if programs < 64:
        return (32, 2, 1) if splits <= 16 else (64, 3, 4)
    return (32, 3, 2) if splits > 2 else (64, 3, 4)
