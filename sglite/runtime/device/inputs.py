"""The forward inputs of a batch as host arrays: what every device's `prepare` starts from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglite.runtime.batch import Batch, IntArray


@dataclass(frozen=True, slots=True)
class HostInputs:
    """N rows, T new tokens, L logits positions."""

    token_rows: IntArray  # [T] row index (in the executor's tables) of each token
    positions: IntArray  # [T]
    slots: IntArray  # [T]
    logits_index: IntArray  # [L]


def host_inputs(batch: Batch, page_table: IntArray, page_size: int) -> HostInputs:
    """`page_table`: int32[max_rows, max_pages_per_row] with this step's updates in it.

    token t of row r:  first[r] <= t < first[r] + num_new[r];  position = starts[r] + (t - first[r])
    its logits:        the last num_logits[r] of them
    """
    if batch.num_tokens == batch.rows.shape[0]:  # one token a row
        positions, token_rows = batch.starts, batch.rows
        if len(batch.mask_slots) == len(token_rows):  # and each has logits
            logits_index = np.arange(len(token_rows), dtype=np.int32)
        else:
            logits_index = np.flatnonzero(batch.num_logits).astype(np.int32)
    else:
        ends = np.cumsum(batch.num_new, dtype=np.int32)
        offsets = batch.starts - (ends - batch.num_new)
        positions = np.arange(batch.num_tokens, dtype=np.int32) + np.repeat(offsets, batch.num_new)
        token_rows = np.repeat(batch.rows, batch.num_new)
        logits_index = ranges(ends - batch.num_logits, batch.num_logits)
    if page_size == 1:
        return HostInputs(token_rows, positions, page_table[token_rows, positions], logits_index)
    pages = page_table[token_rows, positions // page_size]
    return HostInputs(token_rows, positions, pages * page_size + positions % page_size, logits_index)


def ranges(starts: IntArray, lengths: IntArray) -> IntArray:
    """starts[0] .. starts[0] + lengths[0] - 1, then the same of 1, 2, ...: int32[sum(lengths)]."""
    ends = np.cumsum(lengths, dtype=np.int32)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total, dtype=np.int32) + np.repeat(starts - (ends - lengths), lengths)
