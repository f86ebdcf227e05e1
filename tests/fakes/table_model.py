"""A model whose logits depend on the last token alone, read from a table; no weights, no KV."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from sglite.runtime.device.base import AttentionLayer, ForwardBatch
from sglite.runtime.device.cpu import CpuDevice
from sglite.runtime.executor.model_runner import ModelRunner


class TableModel:
    def __init__(self, table: torch.Tensor) -> None:
        self.table = table  # float[vocab, vocab]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        raise NotImplementedError

    def load_dummy(self, seed: int) -> None:
        raise NotImplementedError

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        return self.table[batch.token_ids[batch.logits_index]]


class NoAttention:
    def plan(self, batch: ForwardBatch) -> None:
        pass

    def attend(self, layer: AttentionLayer, qkv: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        raise NotImplementedError


def table_executor(table: torch.Tensor, *, vocab_size: int | None = None, max_rows: int = 16) -> ModelRunner:
    return ModelRunner(
        CpuDevice(num_threads=1),
        TableModel(table),
        NoAttention(),
        num_pages=4096,
        page_size=1,
        max_rows=max_rows,
        max_model_len=256,
        vocab_size=vocab_size or table.shape[1],
        mask_rows=4 * max_rows,
    )
