"""The attention block of a decoder layer: norm, one q, k, v projection, attention, projection onto the stream."""

from __future__ import annotations

import torch

from sglite.runtime.device.base import AttentionLayer, ForwardBatch, SelectiveAttention
from sglite.runtime.layers.context import LayerContext
from sglite.runtime.layers.weights import Linear, Loaders, RmsNorm


class Attention:
    """`layer`: its number, under which the backend keeps its KV. `qk_norm`: q and k are normalised per head."""

    def __init__(
        self,
        layer: int,
        context: LayerContext,
        *,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm: bool = False,
    ) -> None:
        self._layer = layer
        self._context = context
        q_size, kv_size = num_heads * head_dim, num_kv_heads * head_dim
        self._q_size = q_size
        self._norm = RmsNorm(hidden_size, eps, context)
        self._qkv = Linear(hidden_size, (q_size, kv_size, kv_size), bias=qkv_bias, context=context)
        self._out = Linear(q_size, (hidden_size,), bias=out_bias, context=context)
        self._head_norms = (RmsNorm(head_dim, eps, context), RmsNorm(head_dim, eps, context)) if qk_norm else None

    def loaders(self, prefix: str) -> Loaders:
        """`prefix`: of the decoder layer, "model.layers.0"."""
        attention = f"{prefix}.self_attn"
        found = self._qkv.loaders(f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj")
        found |= self._out.loaders(f"{attention}.o_proj")
        found[f"{prefix}.input_layernorm.weight"] = self._norm.loader
        if self._head_norms is not None:
            found[f"{attention}.q_norm.weight"] = self._head_norms[0].loader
            found[f"{attention}.k_norm.weight"] = self._head_norms[1].loader
        return found

    def __call__(
        self, x: torch.Tensor, batch: ForwardBatch, cos_sin: torch.Tensor, selected: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The residual stream before the block -> after it  # [T, hidden], only tokens `selected`  # int[L]  of it."""
        ops, backend = self._context.ops, self._context.attention
        assert backend is not None, "the KV cache was not made yet"
        if selected is not None and isinstance(backend, SelectiveAttention) and backend.leaves_out(batch):
            return self._few_queries(backend, x, batch, cos_sin, selected)
        qkv = ops.norm_linear(x, self._norm.value, self._qkv.packed, self._qkv.bias)
        attended = backend.attend(self._inputs(cos_sin), qkv, batch)
        if selected is not None:
            attended, x = attended.index_select(0, selected), x.index_select(0, selected)
        return ops.linear_add(attended, self._out.packed, self._out.bias, x)

    def _few_queries(
        self,
        backend: SelectiveAttention,
        x: torch.Tensor,
        batch: ForwardBatch,
        cos_sin: torch.Tensor,
        selected: torch.Tensor,
    ) -> torch.Tensor:
        """The same with keys and values of all tokens and the queries of those `selected` alone."""
        ops, layer = self._context.ops, self._inputs(cos_sin)
        weight = backend.keys_values(self._qkv.packed)
        bias = None if self._qkv.bias is None else self._qkv.bias[self._q_size :]
        backend.append(layer, ops.norm_linear(x, self._norm.value, weight, bias), batch)
        x = x.index_select(0, selected)
        qkv = ops.norm_linear(x, self._norm.value, self._qkv.packed, self._qkv.bias)
        attended = backend.attend_selected(layer, qkv, batch)
        return ops.linear_add(attended, self._out.packed, self._out.bias, x)

    def _inputs(self, cos_sin: torch.Tensor) -> AttentionLayer:
        norms = self._head_norms
        return AttentionLayer(self._layer, norms and (norms[0].value, norms[1].value), cos_sin)
