"""What every layer is built with."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglite.runtime.device.base import AttentionBackend, LayerOps


@dataclass(slots=True)
class LayerContext:
    ops: LayerOps
    torch_device: torch.device
    dtype: torch.dtype
    attention: AttentionBackend | None = None  # set once the KV cache is there, which is sized after the weights
