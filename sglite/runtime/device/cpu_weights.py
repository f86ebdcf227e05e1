"""How the CPU keeps the weight of a projection."""

from __future__ import annotations

from typing import Protocol

import torch

_BLOCK_ROWS = 16  # rows for which oneDNN chooses its layout; measured best or within 15 % for 1 to 300


class CpuWeight(Protocol):
    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x  # [T, in]  @ weight.T + bias -> [T, out]."""
        ...

    def linear_add(self, x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
        """residual + x @ weight.T + bias; may be written into residual."""
        ...


class PlainWeight:
    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return torch.nn.functional.linear(x, self._weight, bias)

    def linear_add(self, x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
        return residual.add_(self.linear(x, bias))


def can_pack(weight: torch.Tensor) -> bool:
    """oneDNN is there (it is the operator that torch.compile uses for frozen weights) and knows the type here."""
    return weight.dtype == torch.float32 and torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled


class OneDnnWeight:
    """float32, reordered once into oneDNN's blocked layout."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _BLOCK_ROWS)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")

    def linear_add(self, x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._packed, bias, "add")
