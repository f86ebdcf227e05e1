"""Weights that arrive in parts and are used as one: a fused projection, an embedding, a norm.

Each layer names its parts by checkpoint name in a table of loaders; a part goes straight into its place in the
fused buffer, in the target dtype. Once the last part is there the device packs the weight into its own layout, so
that never more than one weight exists twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from sglite.errors import ModelError
from sglite.runtime.device.base import Norm, PackedWeight
from sglite.runtime.layers.context import LayerContext


@dataclass(frozen=True, slots=True)
class Loader:
    """Where one checkpoint tensor goes. Raises ModelError for a tensor of another shape."""

    shape: tuple[int, ...]
    put: Callable[[torch.Tensor], None]

    def __call__(self, tensor: torch.Tensor) -> None:
        if tuple(tensor.shape) != self.shape:
            raise ModelError(f"a weight has the shape {tuple(tensor.shape)} where config.json asks for {self.shape}")
        self.put(tensor)


Loaders = dict[str, Loader]  # by checkpoint name


class Parameter:
    """A tensor that is loaded whole."""

    def __init__(self, shape: tuple[int, ...], context: LayerContext) -> None:
        self.value = torch.empty(0)  # until loaded
        self._shape = shape
        self._context = context

    @property
    def loader(self) -> Loader:
        return Loader(self._shape, self._put)

    def _put(self, tensor: torch.Tensor) -> None:
        self.value = torch.empty(self._shape, dtype=self._context.dtype, device=self._context.torch_device)
        self.value.copy_(tensor)


class RmsNorm:
    """A norm's weight as the operations take it."""

    def __init__(self, size: int, eps: float, context: LayerContext) -> None:
        self.value = Norm(torch.empty(0), eps)  # until loaded
        self._size = size
        self._context = context

    @property
    def loader(self) -> Loader:
        return Loader((self._size,), self._put)

    def _put(self, tensor: torch.Tensor) -> None:
        weight = tensor.to(self._context.torch_device, self._context.dtype, copy=True)
        self.value = Norm(weight, self.value.eps)


class Linear:
    """Weight and bias of a projection. `parts`: output sizes that are loaded one by one and stand under each other."""

    def __init__(self, inputs: int, parts: Sequence[int], *, bias: bool, context: LayerContext) -> None:
        self.packed: PackedWeight = None  # until loaded
        self.bias: torch.Tensor | None = None
        self._inputs = inputs
        self._parts = list(parts)
        self._ends = [sum(parts[: i + 1]) for i in range(len(parts))]
        self._has_bias = bias
        self._context = context
        self._weight: torch.Tensor | None = None  # while it is loaded
        self._missing = set(range(len(parts)))

    def loaders(self, *names: str) -> Loaders:
        """`names`: the checkpoint prefix of each part, for example "model.layers.0.self_attn.q_proj"."""
        found: Loaders = {}
        for part, name in enumerate(names):
            size = self._parts[part]
            found[f"{name}.weight"] = Loader((size, self._inputs), partial(self._put_weight, part))
            if self._has_bias:
                found[f"{name}.bias"] = Loader((size,), partial(self._put_bias, part))
        return found

    def tied_loader(self, embedding: Parameter) -> Loader:
        """Loads the embedding and takes its weight. At once: what only packing needs is free again before the layers
        are loaded."""

        def put(tensor: torch.Tensor) -> None:
            embedding.loader(tensor)
            self.packed, embedding.value = self._context.ops.pack_tied(embedding.value)

        return Loader(embedding.loader.shape, put)

    def _put_weight(self, part: int, tensor: torch.Tensor) -> None:
        if self._weight is None:
            self._weight = self._empty(self._ends[-1], self._inputs)
        self._weight[self._ends[part] - self._parts[part] : self._ends[part]].copy_(tensor)
        self._missing.discard(part)
        if not self._missing:
            self.packed = self._context.ops.pack(self._weight)
            self._weight = None

    def _put_bias(self, part: int, tensor: torch.Tensor) -> None:
        if self.bias is None:
            self.bias = self._empty(self._ends[-1])
        self.bias[self._ends[part] - self._parts[part] : self._ends[part]].copy_(tensor)

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self._context.dtype, device=self._context.torch_device)
