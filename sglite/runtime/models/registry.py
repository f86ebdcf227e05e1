"""Architecture name -> the module that builds it, imported when first asked for. A new model is one line."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from typing import Protocol, cast

import torch

from sglite.runtime.device.base import ForwardBatch
from sglite.runtime.layers.context import LayerContext
from sglite.runtime.models.config import ModelConfig

_MODULES: Mapping[str, str] = {
    "llama": "sglite.runtime.models.llama",
    "qwen2": "sglite.runtime.models.qwen2",
    "qwen3": "sglite.runtime.models.qwen3",
}


class Model(Protocol):
    """What the model runner needs of a model."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Hugging Face names and tensors, each used before the next is asked for."""
        ...

    def load_dummy(self, seed: int) -> None: ...

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits of the tokens in batch.logits_index  # [L, padded vocab]."""
        ...


class _ModelModule(Protocol):
    def build(self, config: ModelConfig, context: LayerContext, *, max_len: int) -> Model: ...


def build_model(config: ModelConfig, context: LayerContext, *, max_len: int) -> Model:
    """An empty model; `max_len` is the number of positions it must know."""
    module = cast(_ModelModule, importlib.import_module(_MODULES[config.architecture]))
    return module.build(config, context, max_len=max_len)
