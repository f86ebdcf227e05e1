"""`deterministic=True`: what a row computes depends on that row alone.

The fast paths pick a kernel by the number of rows in the step: one for a single row, others for 32, cuBLAS for more,
with its own choice among hundreds. Each is right, and each rounds a little differently, so that a text may change at a
near tie with whoever else is being answered. Here every operation has one order of additions for all sizes of step (see
kernels/invariant.py): greedy text is the same alone and in a batch, with a cache hit and without, in one piece and in
chunks, and after a retraction. What that costs is in benchmarks/gpu.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import triton

from sglite.errors import InvalidRequest
from sglite.runtime.batch import Batch
from sglite.runtime.device.base import AttentionLayer, AttentionShape, ForwardBatch, KVCache, Norm, PackedWeight
from sglite.runtime.device.cuda.inputs import CudaForwardBatch
from sglite.runtime.device.cuda.kernels.attention import norm_rope_append_kernel
from sglite.runtime.device.cuda.kernels.invariant import product_kernel, tile_attention_kernel
from sglite.runtime.device.cuda.ops import launch_norm

_APPEND_TOKENS = 4  # a program of the rope kernel: other numbers would add a head's squares in another order
_KEYS = 64  # a step of the softmax
_QUERY_ROWS = 16
_SMALL_WEIGHT = 16 << 20  # bytes


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a product's outputs are cut. None of it changes the order of additions."""

    block_m: int
    block_n: int
    stages: int
    warps: int


def tiling(rows: int) -> Tiling:
    """The fastest of those measured on an H200 (8B shapes)."""
    if rows <= 64:
        return Tiling(16 if rows <= 16 else 32 if rows <= 32 else 64, 64, 8 if rows <= 16 else 5, 4)
    return Tiling(128, 64, 4, 4) if rows <= 1024 else Tiling(128, 128, 4, 8)


def block_k(inputs: int) -> int:
    """Terms of a sum that are added at a time: of the weight's shape alone. Raises InvalidRequest for widths that no
    model has."""
    for size in (64, 32, 16):
        if inputs % size == 0:
            return size
    raise InvalidRequest(f"deterministic=True needs layers whose width is a multiple of 16, not {inputs}")


class InvariantOps:
    """LayerOps in bfloat16 and float16. `pdl`: the GPU has programmatic dependent launch."""

    def __init__(self, *, pdl: bool) -> None:
        self._pdl = pdl

    def pack(self, weight: torch.Tensor) -> PackedWeight:
        if weight.dtype == torch.float32:
            raise InvalidRequest(
                "deterministic=True works in bfloat16 and float16 on a GPU; choose one as dtype", param="deterministic"
            )
        return weight

    def pack_tied(self, weight: torch.Tensor) -> tuple[PackedWeight, torch.Tensor]:
        return self.pack(weight), weight

    def norm_linear(self, x: torch.Tensor, norm: Norm, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        y = x.new_empty(x.shape[0], weight.shape[0])
        self._product(launch_norm(x, norm, pdl=self._pdl), weight, y, bias)
        return y

    def norm_gated(self, x: torch.Tensor, norm: Norm, weight: PackedWeight) -> torch.Tensor:
        y = x.new_empty(x.shape[0], weight.shape[0] // 2)
        self._product(launch_norm(x, norm, pdl=self._pdl), weight, y, None, gated=True)
        return y

    def linear_add(
        self, x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, residual: torch.Tensor
    ) -> torch.Tensor:
        self._product(x, weight, residual, bias, add=True)
        return residual

    def _product(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        y: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        gated: bool = False,
        add: bool = False,
    ) -> None:
        rows, inputs = x.shape
        if not rows:
            return
        tile, outputs = tiling(rows), y.shape[1]
        stages = 5 if gated and tile.stages > 5 else tile.stages
        product_kernel[(triton.cdiv(rows, tile.block_m), triton.cdiv(outputs, tile.block_n))](
            x, weight, y, x if bias is None else bias, rows, outputs,
            K=inputs, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=block_k(inputs), STAGES=stages,
            PREFETCH=self._prefetch(weight, tile.block_n) if rows <= 64 else 0, LANES=32 * tile.warps,
            GATED=gated, ADD=add, BIAS=bias is not None, PDL=self._pdl, num_warps=tile.warps, launch_pdl=self._pdl,
        )  # fmt: skip

    def _prefetch(self, weight: torch.Tensor, block_n: int) -> int:
        """Bytes of each program's part of the weight. It pays where the whole weight is small."""
        fits = self._pdl and weight.nbytes <= _SMALL_WEIGHT and weight.shape[0] % (2 * block_n) == 0
        return min(block_n * weight.shape[1] * weight.itemsize, 16384) if fits else 0


class InvariantAttention:
    """bf16 and fp16, head sizes that are powers of two."""

    def __init__(self, shape: AttentionShape, cache: KVCache, *, pdl: bool) -> None:
        self._shape = shape
        self._cache = cache
        self._pdl = pdl
        self._group = shape.num_heads // shape.num_kv_heads
        self._block_g = triton.next_power_of_2(self._group)
        self._tokens = max(1, _QUERY_ROWS // self._block_g)
        self._tiles: torch.Tensor | None = None  # int32[4, tiles] of a large step: row, start, first, count

    def plan(self, batch: ForwardBatch) -> None:
        assert isinstance(batch, CudaForwardBatch)
        if batch.key is None:
            tiles = torch.from_numpy(query_tiles(batch.batch, self._tokens))
            self._tiles = tiles.to(batch.token_ids.device)  # unpinned: copied to a staging buffer before this returns

    def attend(self, layer: AttentionLayer, qkv: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        assert isinstance(batch, CudaForwardBatch)
        shape, tokens = self._shape, qkv.shape[0]
        q = qkv.new_empty(tokens, shape.num_heads, shape.head_dim)
        q_norm, k_norm = layer.norms or (None, None)
        k_cache, v_cache = self._cache.k[layer.number], self._cache.v[layer.number]
        norm_rope_append_kernel[(shape.num_heads + 2 * shape.num_kv_heads, triton.cdiv(tokens, _APPEND_TOKENS))](
            qkv, qkv if q_norm is None else q_norm.weight, qkv if k_norm is None else k_norm.weight, layer.cos_sin,
            batch.positions, batch.slots, q, qkv, k_cache, v_cache, tokens, 0.0 if q_norm is None else q_norm.eps,
            HQ=shape.num_heads, HKV=shape.num_kv_heads, D=shape.head_dim, BLOCK_T=_APPEND_TOKENS,
            QK_NORM=layer.norms is not None, QUERIES=True, KEYS=False, PDL=self._pdl, launch_pdl=self._pdl,
        )  # fmt: skip
        out = torch.empty_like(q)
        single = batch.key is not None  # what was planned last may be another step: a graph is captured without a plan
        tiles = None if single else self._tiles
        rows, starts, firsts, counts = (batch.rows, batch.starts, q, q) if tiles is None else tiles
        tile_attention_kernel[(tokens if single else len(rows), shape.num_kv_heads)](
            q, k_cache, v_cache, batch.page_table, rows, starts, firsts, counts, out, batch.page_table.stride(0),
            shape.scale * math.log2(math.e),
            HKV=shape.num_kv_heads, GROUP=self._group, BLOCK_G=self._block_g, TOKENS=self._tokens, D=shape.head_dim,
            BLOCK_T=_KEYS, PAGE_SIZE=batch.page_size, STAGES=3, SINGLE=single, PDL=self._pdl, num_warps=4,
            launch_pdl=self._pdl,
        )  # fmt: skip
        return out.flatten(1)


def query_tiles(batch: Batch, tokens: int) -> np.ndarray:
    """The new tokens of each row, `tokens` at a time: int32[4, tiles] of row, start, first and count."""
    tiles = -(-batch.num_new // tokens)
    owner = np.repeat(np.arange(len(tiles)), tiles)
    skipped = (np.arange(len(owner)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * tokens  # of the row's new tokens
    first = (np.cumsum(batch.num_new) - batch.num_new)[owner] + skipped
    count = np.minimum(batch.num_new[owner] - skipped, tokens)
    return np.stack([batch.rows[owner], batch.starts[owner] + skipped, first, count]).astype(np.int32)
