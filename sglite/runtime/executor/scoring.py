"""Log probabilities of a step: which positions, computed how, put back where.

Two kinds of row. One with `target_ids` does not sample: logprobs of given ids at its logits positions, and the best
ids of all these. One that samples and is in `logprob_rows`: of what it draws, positions behind the accepted ones cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sglite.runtime.batch import Batch, IntArray, StepResult
from sglite.runtime.device.base import SamplePlan
from sglite.runtime.executor.logits.bitmask import allowed_tokens
from sglite.runtime.executor.logits.logprobs import chosen_logprobs, logprobs_at, top_logprobs


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """A row's logits positions first .. last (of the step's L) and what is wanted of them."""

    index: int  # in the batch
    first: int
    last: int
    positions: IntArray  # [K] 0 .. last - first - 1
    targets: IntArray | None  # [K] the ids; None: what the draws `draws` give
    draws: slice  # of the plan's draws
    top: int  # best ids wanted; 0: none


class StepScores:
    """One step's logprobs. Empty for most steps: then every method returns at once."""

    def __init__(self, batch: Batch, plan: SamplePlan, top_wanted: IntArray) -> None:
        """top_wanted: int32[max_rows] how many best tokens each row wants."""
        self._mask_slots = batch.mask_slots
        self._rows: list[ScoredRow] = []
        self._scored: list[ScoredRow] = []  # of these, the ones with targets
        asked = set(batch.logprob_rows.tolist())
        if not asked and not batch.target_ids:
            return
        ends = np.cumsum(batch.num_logits).tolist()
        draw_of = dict(zip(np.flatnonzero(batch.samples).tolist(), plan.first_draw.tolist(), strict=True))
        for i in sorted(asked | set(batch.target_ids)):
            top = max(0, int(top_wanted[batch.rows[i]])) if i in asked else 0
            targets = batch.target_ids.get(i)
            if targets is not None:
                first, draws = ends[i] - int(batch.num_logits[i]), slice(0, 0)
                positions = batch.target_positions.get(i, np.arange(len(targets), dtype=np.int32))
            else:
                size = int(batch.num_drafts[i]) + 1
                first, draws = ends[i] - size, slice(draw_of[i], draw_of[i] + size)
                positions = np.arange(size, dtype=np.int32)
            self._rows.append(ScoredRow(i, first, ends[i], positions, targets, draws, top))
        self._scored = [row for row in self._rows if row.targets is not None and len(row.targets)]

    def compute(
        self, logits: torch.Tensor, tokens: torch.Tensor | None, masks: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        """logits: [L, vocab] as the model gave them; tokens: int32[S] the draws; masks: the step's mask buffer on the
        device, None where no position has a mask."""
        found: dict[str, torch.Tensor] = {}
        if self._scored:
            found["targets"] = self._targets(logits)
        for row in self._rows:
            part = logits[row.first : row.last]
            if row.targets is None:
                assert tokens is not None
                ids, positions = tokens[row.draws], torch.arange(row.last - row.first, device=logits.device)
                found[f"chosen{row.index}"] = chosen_logprobs(part, positions, ids)
                slots = self._mask_slots[row.first : row.last]
                if masks is not None and (slots >= 0).any():
                    allowed = allowed_tokens(masks, torch.from_numpy(slots).to(logits.device), logits.shape[1])
                    found[f"masked{row.index}"] = chosen_logprobs(part, positions, ids, allowed)
            if row.top:
                found[f"top{row.index}"], found[f"top_ids{row.index}"] = top_logprobs(part, row.top)
        return found

    def _targets(self, logits: torch.Tensor) -> torch.Tensor:
        """float32[K]: of all rows' targets, one row after the other. One copy to the device, and nothing is waited for:
        row by row, each copy would wait for the forward."""
        positions = np.concatenate([row.positions + row.first for row in self._scored])
        used, places = np.unique(positions, return_inverse=True)
        ids = np.concatenate([row.targets for row in self._scored if row.targets is not None])
        numbers = torch.from_numpy(np.concatenate([used, places, ids]).astype(np.int64))
        if logits.device.type != "cpu":
            numbers = numbers.pin_memory().to(logits.device, non_blocking=True)
        rows, at, wanted = numbers.split([len(used), len(ids), len(ids)])
        return logprobs_at(logits, rows, at, wanted)

    def collect(self, copies: Mapping[str, NDArray[Any]], result: StepResult) -> None:
        start = 0
        for row in self._scored:
            end = start + len(row.positions)
            result.chosen_logprobs[row.index] = copies["targets"][start:end]
            start = end
        for row in self._rows:
            i = row.index
            size = int(result.num_accepted[i]) if row.targets is None else None
            if f"chosen{i}" in copies:
                result.chosen_logprobs[i] = copies[f"chosen{i}"][:size]
            elif i not in result.chosen_logprobs:  # it was asked for the logprobs of no token
                result.chosen_logprobs[i] = np.empty(0, np.float32)
            if f"masked{i}" in copies:
                result.masked_logprobs[i] = copies[f"masked{i}"][:size]
            if row.top:
                result.top_logprobs[i] = (copies[f"top_ids{i}"][:size], copies[f"top{i}"][:size])
