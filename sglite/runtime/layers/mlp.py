"""The gated feed-forward block: norm, gate and up as one projection, down onto the residual stream."""

from __future__ import annotations

import torch

from sglite.runtime.layers.context import LayerContext
from sglite.runtime.layers.weights import Linear, Loaders, RmsNorm


class GatedMlp:
    def __init__(self, context: LayerContext, *, hidden_size: int, intermediate_size: int, eps: float) -> None:
        self._ops = context.ops
        self._norm = RmsNorm(hidden_size, eps, context)
        self._gate_up = Linear(hidden_size, (intermediate_size, intermediate_size), bias=False, context=context)
        self._down = Linear(intermediate_size, (hidden_size,), bias=False, context=context)

    def loaders(self, prefix: str) -> Loaders:
        """`prefix`: of the decoder layer, "model.layers.0"."""
        found = self._gate_up.loaders(f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj")
        found |= self._down.loaders(f"{prefix}.mlp.down_proj")
        found[f"{prefix}.post_attention_layernorm.weight"] = self._norm.loader
        return found

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The residual stream before the block -> after it.  [T, hidden]"""
        gated = self._ops.norm_gated(x, self._norm.value, self._gate_up.packed)
        return self._ops.linear_add(gated, self._down.packed, None, x)
