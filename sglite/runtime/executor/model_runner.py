"""The executor of one device: it owns the KV cache, the page table and the per-row tables, and decides nothing.

A step: loads and page updates into the tables, input preparation, the model up to the logits; then the draws,
the write-back of last tokens on the device, and the copy to the host, which only `PendingStep.wait` blocks for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from sglite.grammar.matcher import Bitmask
from sglite.runtime.batch import Batch, StepResult
from sglite.runtime.device.base import AttentionBackend, Device, HostCopy, RowTables
from sglite.runtime.executor.grammar_mask import MaskRing
from sglite.runtime.executor.logits.draw import TorchSamplerOps
from sglite.runtime.executor.row_tables import SamplingTables
from sglite.runtime.executor.sampler import DrawnRows, DrawPlanner, Sampler
from sglite.runtime.executor.scoring import StepScores
from sglite.runtime.models.registry import Model


class QueuedStep:
    """A step on its way to the host."""

    def __init__(self, copy: HostCopy, drawn: DrawnRows, scores: StepScores) -> None:
        self._copy: HostCopy | None = copy
        self._drawn = drawn
        self._scores = scores
        self._result: StepResult | None = None

    def wait(self) -> StepResult:
        if self._result is None:
            assert self._copy is not None
            copies = self._copy.wait()
            self._result = self._drawn.collect(copies)
            self._scores.collect(copies, self._result)
            self._copy = None
        return self._result


class ModelRunner:
    """`attention` is the one that `model` was built with. `vocab_size` is the tokenizer's: what the model has beyond
    it is padding that can never be drawn. `mask_rows`: logits positions of one step that may have a bitmask."""

    def __init__(
        self,
        device: Device,
        model: Model,
        attention: AttentionBackend,
        *,
        num_pages: int,
        page_size: int,
        max_rows: int,
        max_model_len: int,
        vocab_size: int,
        mask_rows: int,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.max_rows = max_rows
        self.vocab_size = vocab_size
        self.mask_rows = mask_rows
        self.kept_mask_rows = device.kept_mask_rows(-(-vocab_size // 32))
        self.overlaps = device.overlaps
        self.shares_prefix_reads: bool = getattr(attention, "shares_prefix_reads", False)
        self._device = device
        self._attention = attention
        self._forward = device.capture_forward(model.forward)
        self._sample = device.capture_sample(Sampler(device.sampler_ops() or TorchSamplerOps()).run)
        self._tables = _row_tables(device, max_rows, -(-max_model_len // page_size), page_size)
        self._sampling = SamplingTables(max_rows, vocab_size, device.torch_device)
        self._planner = DrawPlanner(self._sampling)
        self._masks = MaskRing(device, mask_rows, vocab_size)
        self._logits: torch.Tensor | None = None

    @torch.inference_mode()
    def forward(self, batch: Batch) -> None:
        self._sampling.load(batch.loads)
        updates = batch.page_updates
        self._tables.host_page_table[updates.rows, updates.columns] = updates.pages
        inputs = self._device.prepare(batch, self._tables)
        self._attention.plan(inputs)
        self._logits = self._forward(inputs)[:, : self.vocab_size]
        self._masks.turn()

    def caught_up(self) -> bool:
        return self._device.caught_up()

    def mask_buffer(self) -> Bitmask:
        return self._masks.host_array

    @torch.inference_mode()
    def sample(self, batch: Batch) -> QueuedStep:
        logits, self._logits = self._logits, None
        assert logits is not None, "sample() without forward()"
        self._sampling.count_known(batch)
        plan = self._planner.plan(batch)
        scores = StepScores(batch, plan, self._sampling.logprobs)
        inputs = self._device.prepare_sample(
            plan,
            host_masks=self._masks.host_tensor,
            kept_masks=batch.kept_masks,
            counts=self._sampling.counts.values,
            bias=self._sampling.bias.values,
            last_tokens=self._tables.last_tokens,
        )
        copies: dict[str, torch.Tensor] = {}
        tokens = None
        if len(plan.rows):
            output = self._sample(logits, inputs)
            tokens = output.tokens
            copies = {"tokens": tokens, "num_accepted": output.num_accepted, "status": output.status}
        copies |= scores.compute(logits, tokens, inputs.masks if (batch.mask_slots >= 0).any() else None)
        drawn = DrawnRows(len(batch.rows), np.flatnonzero(batch.samples), plan)
        queued = QueuedStep(self._device.to_host(copies), drawn, scores)
        self._device.between_steps()
        return queued

    def step_seconds(self, num_rows: int, num_tokens: int) -> float | None:
        return self._device.step_seconds(num_rows, num_tokens)

    @torch.inference_mode()
    def compile_kernels(self, batches: Sequence[Batch], facts: object, progress: Callable[[str], None]) -> None:
        """See Device. Before the first step; `batches`: one for each kind of draws."""

        def draws() -> None:
            for batch in batches:
                self.forward(batch)
                self.sample(batch)

        self._device.compile_kernels(self._tables, draws, (facts, self.vocab_size, self.max_rows), progress)

    def rest(self) -> bool:
        return self._device.rest()

    def close(self) -> None:
        self._logits = None


def _row_tables(device: Device, max_rows: int, max_pages: int, page_size: int) -> RowTables:
    page_table = torch.zeros((max_rows, max_pages), dtype=torch.int32, device=device.torch_device)
    on_host = page_table.device.type == "cpu"
    host = page_table.numpy() if on_host else np.zeros((max_rows, max_pages), np.int32)
    last_tokens = torch.zeros(max_rows, dtype=torch.int32, device=device.torch_device)
    return RowTables(host, page_table, last_tokens, page_size)
