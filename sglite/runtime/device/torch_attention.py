"""Paged attention in plain torch on any device: the reference that the fast backends are tested against."""

from __future__ import annotations

import torch

from sglite.runtime.device.base import AttentionLayer, AttentionShape, ForwardBatch, KVCache, Norm


class TorchAttention:
    """Row by row: gather the row's keys and values through its page table, then masked attention. Slow and plain."""

    def __init__(self, shape: AttentionShape, cache: KVCache) -> None:
        self._shape = shape
        self._cache = cache
        self._slots: list[torch.Tensor] = []
        self._masks: list[torch.Tensor] = []

    def plan(self, batch: ForwardBatch) -> None:
        plan, device = batch.batch, batch.slots.device
        size = self._cache.page_size
        self._slots, self._masks = [], []
        for row, start, new in zip(plan.rows.tolist(), plan.starts.tolist(), plan.num_new.tolist(), strict=True):
            positions = torch.arange(start + new, device=device)
            self._slots.append(batch.page_table[row].long()[positions // size] * size + positions % size)
            self._masks.append(positions[None, :] <= positions[start:, None])  # [new, start + new]

    def attend(self, layer: AttentionLayer, qkv: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        shape = self._shape
        sizes = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
        q, k, v = qkv.unflatten(-1, (-1, shape.head_dim)).split(sizes, dim=1)
        if layer.norms is not None:
            q, k = rms_norm(q, layer.norms[0]), rms_norm(k, layer.norms[1])
        angles = layer.cos_sin[batch.positions]
        q, k = rotate(q, angles), rotate(k, angles)
        keys, values = self._cache.k[layer.number], self._cache.v[layer.number]
        keys[batch.slots] = k
        values[batch.slots] = v
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        first = 0
        for slots, mask in zip(self._slots, self._masks, strict=True):
            last = first + mask.shape[0]
            out[first:last] = torch.nn.functional.scaled_dot_product_attention(
                q[first:last].transpose(0, 1)[None],
                keys[slots].transpose(0, 1)[None],
                values[slots].transpose(0, 1)[None],
                attn_mask=mask,
                scale=shape.scale,
                enable_gqa=True,
            )[0].transpose(0, 1)
            first = last
        return out.flatten(1)


def rms_norm(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    wide = x.float()
    wide = wide * (wide.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
    return wide.to(x.dtype) * norm.weight


def rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """x: [T, heads, head_dim], angles: float32[T, head_dim] (cos, then sin). Computed in the dtype of x."""
    cos, sin = angles[:, None].to(x.dtype).chunk(2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
