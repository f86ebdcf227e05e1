"""Sampling parameters per row on the host, and the token counts and biases per row on the device.

Counts and biases are as wide as the vocabulary, so only rows that use them get a slot; the tables grow with need.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from sglite.runtime.batch import Batch, IntArray, RowLoad, RowSampling
from sglite.runtime.device.base import SEEN_IN_PROMPT

MIN_TEMPERATURE = 1e-4  # below, dividing by it overflows; it is greedy then, as the limit is


class SlotTable:
    """A table [slots, vocab] on the device of which rows borrow slots."""

    def __init__(self, vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.values = torch.zeros((0, vocab_size), dtype=dtype, device=device)
        self._free: list[int] = []

    def take(self) -> int:
        """A zeroed slot. May replace `values` by a larger tensor; views made before stay valid for what they were."""
        if not self._free:
            old = self.values
            size = max(4, 2 * old.shape[0])
            self.values = torch.zeros((size, old.shape[1]), dtype=old.dtype, device=old.device)
            self.values[: old.shape[0]] = old
            self._free = list(range(size - 1, old.shape[0] - 1, -1))
        slot = self._free.pop()
        self.values[slot].zero_()
        return slot

    def give_back(self, slot: int) -> None:
        self._free.append(slot)


class CountedRow:
    """Where the counts of a row with penalties stand.

    `output_start`: the position of its first output token, known with its first draw. Tokens at positions below
    `counted_to` are counted. After a draw the device counted what it accepted, and the first new token is the last
    of these.
    """

    def __init__(self, slot: int, num_outputs: int) -> None:
        self.slot = slot
        self.output_start: int | None = None
        self._loaded = num_outputs
        self._counted_to = 0
        self._drew = False

    def advance(self, start: int, end: int, draw_index: int | None) -> tuple[int, int]:
        """A step computes the positions start .. end - 1 of known tokens (without drafts) and then draws output
        `draw_index` (None: draws nothing). Returns the range of positions that are outputs and not counted yet."""
        if draw_index is not None and self.output_start is None:
            self.output_start = end - draw_index
            self._counted_to = self.output_start + self._loaded
        if self.output_start is None:
            return end, end
        first = start + 1 if self._drew else max(self._counted_to, start)
        self._counted_to = end
        self._drew = draw_index is not None
        return min(first, end), end


class SamplingTables:
    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self._device = device
        self.temperature = np.zeros(max_rows, np.float32)
        self.top_p = np.ones(max_rows, np.float32)
        self.min_p = np.zeros(max_rows, np.float32)
        self.top_k = np.full(max_rows, vocab_size, np.int32)
        self.presence = np.zeros(max_rows, np.float32)
        self.frequency = np.zeros(max_rows, np.float32)
        self.repetition = np.ones(max_rows, np.float32)
        self.seeds = np.zeros(max_rows, np.uint64)
        self.logprobs = np.full(max_rows, -1, np.int32)
        self.count_slots = np.full(max_rows, -1, np.int32)
        self.bias_slots = np.full(max_rows, -1, np.int32)
        self.counts = SlotTable(vocab_size, torch.int32, device)
        self.bias = SlotTable(vocab_size, torch.float32, device)
        self._counted: dict[int, CountedRow] = {}
        self.version = 0  # grows when a row gets a new tenant

    def load(self, loads: Sequence[RowLoad]) -> None:
        self.version += bool(loads)
        for load in loads:
            self._free(load.row)
            self._set(load.row, load.sampling)
            if load.sampling.needs_counts:
                self._start_counts(load)
            if load.sampling.logit_bias:
                slot = self.bias_slots[load.row] = self.bias.take()
                ids, values = zip(*load.sampling.logit_bias, strict=True)
                self.bias.values[slot, self._ids(ids)] = torch.tensor(values, dtype=torch.float32, device=self._device)

    def count_known(self, batch: Batch) -> None:
        """Count output tokens of the batch that no draw of the executor made: forced text."""
        if not self._counted:
            return
        first = 0
        slots: list[int] = []
        tokens: list[int] = []
        for i, row in enumerate(batch.rows.tolist()):
            new, start = int(batch.num_new[i]), int(batch.starts[i])
            counted = self._counted.get(row)
            if counted is not None:
                end = start + new - int(batch.num_drafts[i])
                low, high = counted.advance(start, end, int(batch.output_index[i]) if batch.samples[i] else None)
                found = batch.token_ids[first + low - start : first + high - start].tolist()
                slots += [counted.slot] * len(found)
                tokens += found
            first += new
        if tokens:
            self._add(slots, tokens)

    def _set(self, row: int, sampling: RowSampling) -> None:
        self.temperature[row] = sampling.temperature if sampling.temperature >= MIN_TEMPERATURE else 0.0
        self.top_p[row] = sampling.top_p
        self.min_p[row] = sampling.min_p
        self.top_k[row] = min(sampling.top_k, self.vocab_size) if sampling.top_k > 0 else self.vocab_size
        self.presence[row] = sampling.presence_penalty
        self.frequency[row] = sampling.frequency_penalty
        self.repetition[row] = sampling.repetition_penalty
        self.seeds[row] = sampling.seed & 0xFFFFFFFFFFFFFFFF
        self.logprobs[row] = min(sampling.logprobs, self.vocab_size)

    def _start_counts(self, load: RowLoad) -> None:
        slot = self.counts.take()
        self.count_slots[load.row] = slot
        outputs = load.output_ids if load.output_ids is not None else np.empty(0, np.int32)
        self._counted[load.row] = CountedRow(slot, len(outputs))
        if load.prompt_ids is not None:
            self.counts.values[slot, self._ids(np.unique(load.prompt_ids))] = SEEN_IN_PROMPT
        self._add([slot] * len(outputs), outputs.tolist())

    def _add(self, slots: list[int], tokens: list[int]) -> None:
        ones = torch.ones(len(tokens), dtype=torch.int32, device=self._device)
        self.counts.values.index_put_((self._ids(slots), self._ids(tokens)), ones, accumulate=True)

    def _free(self, row: int) -> None:
        self._counted.pop(row, None)
        for table, slots in ((self.counts, self.count_slots), (self.bias, self.bias_slots)):
            if slots[row] >= 0:
                table.give_back(int(slots[row]))
                slots[row] = -1

    def _ids(self, ids: Sequence[int] | IntArray) -> torch.Tensor:
        return torch.as_tensor(ids, dtype=torch.int64, device=self._device)
