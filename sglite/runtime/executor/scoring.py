"""Log probabilities of a step: which positions, computed how, put back where.

Two kinds of position. Scored: the row has `target_ids`, all its logits positions count; their ids are known before
the draw. Drawn: the row wants the logprobs of what it draws. A target of -1 at a position that draws stands for
the drawn token.
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
from sglite.runtime.executor.logits.logprobs import Logprobs, logprobs_of


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """`first` .. `last`: its logits positions that count. `targets`: their ids, -1 where the draw decides."""

    index: int  # in the batch
    first: int
    last: int
    targets: IntArray
    draws: IntArray  # [last - first] which draw of the plan stands there, or -1
    top: int  # how many best tokens; -1: none wanted


class StepScores:
    """One step's logprobs. Empty for most steps: then every method returns at once."""

    def __init__(self, batch: Batch, plan: SamplePlan, wanted: IntArray) -> None:
        """wanted: int32[max_rows] how many best tokens each row wants, -1: none."""
        self._rows: list[ScoredRow] = []
        indices = sorted({*batch.logprob_rows.tolist(), *batch.target_ids})
        if not indices:
            return
        ends = np.cumsum(batch.num_logits)
        draw_at = np.full(int(ends[-1]), -1, np.int32)
        draw_at[plan.logits_index] = np.arange(len(plan.logits_index), dtype=np.int32)
        asked = set(batch.logprob_rows.tolist())
        for i in indices:
            last = int(ends[i])
            targets = batch.target_ids.get(i)
            first = last - (int(batch.num_logits[i]) if targets is not None else int(batch.num_drafts[i]) + 1)
            if targets is None:
                targets = np.full(last - first, -1, np.int32)
            top = int(wanted[batch.rows[i]]) if i in asked else -1
            self._rows.append(ScoredRow(i, first, last, targets, draw_at[first:last], top))

    def compute(
        self, logits: torch.Tensor, tokens: torch.Tensor | None, masks: torch.Tensor | None, mask_slots: IntArray
    ) -> dict[str, torch.Tensor]:
        """logits: [L, vocab] as the model gave them; tokens: int32[S]; masks: the step's buffer on the device, with mask_slots  # [L]."""
        found: dict[str, torch.Tensor] = {}
        for row in self._rows:
            ids = torch.from_numpy(row.targets).to(logits.device)
            drawn = np.flatnonzero((row.targets < 0) & (row.draws >= 0))
            if len(drawn) and tokens is not None:
                ids = ids.clone()
                ids[torch.from_numpy(drawn).to(ids.device)] = tokens[
                    torch.from_numpy(row.draws[drawn].astype(np.int64)).to(ids.device)
                ]
            allowed = self._allowed(row, logits, masks, mask_slots)
            scores = logprobs_of(logits[row.first : row.last], ids.clamp(min=0), max(row.top, 0), allowed)
            found |= _named(row.index, scores)
        return found

    def collect(self, copies: Mapping[str, NDArray[Any]], result: StepResult) -> None:
        """Put the copies into the result; positions behind a row's accepted draws are cut."""
        for row in self._rows:
            i = row.index
            size = row.last - row.first
            if (row.targets < 0).all():
                size = int(result.num_accepted[i])
            result.chosen_logprobs[i] = copies[f"chosen{i}"][:size]
            if f"masked{i}" in copies:
                result.masked_logprobs[i] = copies[f"masked{i}"][:size]
            if row.top >= 0:
                result.top_logprobs[i] = (copies[f"top_ids{i}"][:size], copies[f"top{i}"][:size])

    @staticmethod
    def _allowed(
        row: ScoredRow, logits: torch.Tensor, masks: torch.Tensor | None, mask_slots: IntArray
    ) -> torch.Tensor | None:
        slots = mask_slots[row.first : row.last]
        if masks is None or not (slots >= 0).any():
            return None
        index = torch.from_numpy(np.maximum(slots, 0)).to(logits.device)
        allowed = allowed_tokens(masks, index, logits.shape[1])
        allowed[torch.from_numpy(slots < 0).to(logits.device)] = True
        return allowed


def _named(index: int, scores: Logprobs) -> dict[str, torch.Tensor]:
    found = {f"chosen{index}": scores.chosen, f"top_ids{index}": scores.top_ids, f"top{index}": scores.top}
    if scores.masked is not None:
        found[f"masked{index}"] = scores.masked
    return found
