"""What a device must offer. One engine code path runs on all of them; the CPU is the reference for the tests.

A device makes buffers, the attention backend, the fused layer operations and the sampler kernels. Every
operation has a portable torch twin in `cpu.py`; tests compare the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from sglite.runtime.batch import Batch


@dataclass(slots=True)
class KVCache:
    """Per layer k and v: [num_pages * page_size, num_kv_heads, head_dim]. Slot = page * page_size + offset."""

    k: list[torch.Tensor]
    v: list[torch.Tensor]
    page_size: int


@dataclass(slots=True)
class ForwardBatch:
    """A batch as device tensors, made by the model runner. N rows, T new tokens, L logits positions.

    On a device with captured graphs these are views of persistent buffers, padded to the captured size.
    """

    batch: Batch
    token_ids: torch.Tensor  # int32[T], DEVICE_TOKEN already replaced on the device
    positions: torch.Tensor  # int32[T]
    slots: torch.Tensor  # int32[T] where each new token's KV goes
    page_table: torch.Tensor  # int32[max_rows, max_pages_per_row], the executor's own
    rows: torch.Tensor  # int32[N]
    starts: torch.Tensor  # int32[N]
    num_new: torch.Tensor  # int32[N]
    logits_index: torch.Tensor  # int32[L] which of the T tokens need logits


class AttentionBackend(Protocol):
    """Paged attention over a KVCache. `plan` once per step, `append` and `attend` once per layer."""

    def plan(self, batch: ForwardBatch) -> None: ...

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        """Write k, v (already rotated)  # [T, num_kv_heads, head_dim]  into the batch's slots, then causal attention
        of q  # [T, num_heads, head_dim]  of each row over its positions 0 .. own. Returns [T, num_heads, head_dim]."""
        ...


class LayerOps(Protocol):
    """The operations of a decoder layer that a device may fuse."""

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor: ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor: ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """residual' = x + residual; returns (norm(residual') * weight, residual'). May write in place."""
        ...

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[T, 2 * I] -> [T, I]: silu(first half) * second half."""
        ...

    def rope(
        self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate halves (NeoX style). cos_sin: float32[max_len, head_dim], cos then sin. May write in place."""
        ...


class Device(Protocol):
    name: str  # "cpu", "cuda:0"
    torch_device: torch.device
    ops: LayerOps
    overlaps: bool

    def free_memory(self) -> int:
        """Bytes that the KV pool may be sized from."""
        ...
