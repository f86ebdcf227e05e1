"""From a batch's logits to its StepResult: plan the draws on the host, draw on the device, put the results together.

plan(batch)                    -> SamplePlan          host numbers
run(logits, SampleBatch)       -> SampleOutput        pure device work, may be a captured graph
score(...)                     -> logprobs            only for rows that asked, outside the graph
collect(...)                   -> StepResult          when the copies are on the host
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sglite.runtime.batch import Batch, IntArray, StepResult
from sglite.runtime.device.base import (
    STATUS_EMPTY_MASK,
    STATUS_NAN,
    SampleBatch,
    SampleFlags,
    SampleOutput,
    SamplePlan,
    SamplerOps,
)
from sglite.runtime.device.inputs import ranges
from sglite.runtime.executor.logits.noise import noise_keys
from sglite.runtime.executor.row_tables import SamplingTables

_ERRORS = {
    STATUS_NAN: "the model gave no finite logits (NaN) for this row",
    STATUS_EMPTY_MASK: "the grammar allows no token at this place",
}


def plan_draws(batch: Batch, tables: SamplingTables) -> SamplePlan:
    """A sampling row draws at its last num_drafts + 1 logits positions."""
    chosen = np.flatnonzero(batch.samples)
    rows, num_draws = batch.rows[chosen], batch.num_drafts[chosen] + 1
    logits_ends = np.cumsum(batch.num_logits, dtype=np.int32)[chosen]
    logits_index = ranges(logits_ends - num_draws, num_draws)
    first_draw = np.cumsum(num_draws, dtype=np.int32) - num_draws
    draw_rows = np.repeat(rows, num_draws)
    rank = ranges(np.zeros_like(num_draws), num_draws)
    mask_index = batch.mask_slots[logits_index]
    temperature = tables.temperature[draw_rows]
    top_p, min_p, top_k = tables.top_p[draw_rows], tables.min_p[draw_rows], tables.top_k[draw_rows]
    count_slots, bias_slots = tables.count_slots[draw_rows], tables.bias_slots[draw_rows]
    random = temperature > 0
    filtered = (top_p < 1) | (min_p > 0) | (top_k < tables.vocab_size)
    flags = SampleFlags(
        masked=bool((mask_index >= 0).any()),
        random=bool(random.any()),
        filtered=bool((random & filtered).any()),
        penalized=bool((count_slots >= 0).any()),
        biased=bool((bias_slots >= 0).any()),
        drafts=len(rank) > len(rows),
    )
    return SamplePlan(
        flags=flags,
        rows=rows,
        first_draw=first_draw,
        num_draws=num_draws,
        logits_index=logits_index,
        draw_rows=draw_rows,
        draft_ids=_draft_ids(batch, chosen, num_draws, rank),
        mask_index=mask_index,
        keys=noise_keys(tables.seeds[draw_rows], np.repeat(batch.output_index[chosen], num_draws) + rank),
        temperature=temperature,
        top_p=top_p,
        min_p=min_p,
        top_k=top_k,
        presence=tables.presence[draw_rows],
        frequency=tables.frequency[draw_rows],
        repetition=tables.repetition[draw_rows],
        count_slots=count_slots,
        bias_slots=bias_slots,
    )


class DrawPlanner:
    """`plan_draws` for step after step: what steps of the same rows with one draw each have in common is kept."""

    def __init__(self, tables: SamplingTables) -> None:
        self._tables = tables
        self._last: SamplePlan | None = None
        self._version = -1

    def plan(self, batch: Batch) -> SamplePlan:
        if len(batch.mask_slots) != len(batch.rows) or not batch.samples.all():
            return plan_draws(batch, self._tables)
        last = self._last
        if last is None or self._version != self._tables.version or not np.array_equal(batch.rows, last.rows):
            self._last, self._version = plan_draws(batch, self._tables), self._tables.version
            return self._last
        return self._next(last, batch)

    def _next(self, last: SamplePlan, batch: Batch) -> SamplePlan:
        flags = last.flags
        masked = bool(np.maximum.reduce(batch.mask_slots) >= 0)
        return SamplePlan(  # copy.copy takes ten times as long
            flags=flags if masked == flags.masked else replace(flags, masked=masked),
            rows=last.rows,
            first_draw=last.first_draw,
            num_draws=last.num_draws,
            logits_index=last.logits_index,
            draw_rows=last.draw_rows,
            draft_ids=last.draft_ids,
            mask_index=batch.mask_slots,
            keys=noise_keys(self._tables.seeds[batch.rows], batch.output_index) if flags.random else last.keys,
            temperature=last.temperature,
            top_p=last.top_p,
            min_p=last.min_p,
            top_k=last.top_k,
            presence=last.presence,
            frequency=last.frequency,
            repetition=last.repetition,
            count_slots=last.count_slots,
            bias_slots=last.bias_slots,
        )


def _draft_ids(batch: Batch, chosen: NDArray[Any], num_draws: IntArray, rank: IntArray) -> IntArray:
    """The draft at each draw's place; -1 at each row's last draw."""
    drafts = np.full(len(rank), -1, np.int32)
    if len(rank) > len(chosen):
        token_ends = np.cumsum(batch.num_new, dtype=np.int32)[chosen]
        drafted = rank < np.repeat(num_draws, num_draws) - 1
        drafts[drafted] = batch.token_ids[ranges(token_ends - (num_draws - 1), num_draws - 1)]
    return drafts


class Sampler:
    def __init__(self, ops: SamplerOps) -> None:
        self._ops = ops

    def run(self, logits: torch.Tensor, batch: SampleBatch) -> SampleOutput:
        """logits: [L, vocab]."""
        tokens, status = self._ops.draw(logits, batch)
        return SampleOutput(tokens, self._ops.verify(tokens, batch), status)


@dataclass(frozen=True, slots=True)
class DrawnRows:
    """Which of the batch's rows drew, to put host copies of a SampleOutput back in their places."""

    num_rows: int
    sampling: NDArray[Any]  # [R] indices into the batch
    plan: SamplePlan

    def collect(self, copies: Mapping[str, NDArray[Any]]) -> StepResult:
        """Where nothing drew there are no copies of it either."""
        width = int(self.plan.num_draws.max(initial=1))
        result = StepResult(np.zeros(self.num_rows, np.int32), np.full((self.num_rows, width), -1, np.int32))
        if not len(self.sampling):
            return result
        tokens, accepted, status = copies["tokens"], copies["num_accepted"], copies["status"]
        result.num_accepted[self.sampling] = accepted
        if width == 1:
            result.tokens[self.sampling, 0] = tokens
        else:
            rank = ranges(np.zeros_like(self.plan.num_draws), self.plan.num_draws)
            row = np.repeat(self.sampling, self.plan.num_draws)
            taken = rank < np.repeat(accepted, self.plan.num_draws)
            result.tokens[row[taken], rank[taken]] = tokens[taken]
        if status.any():
            self._collect_errors(result, accepted, status)
        return result

    def _collect_errors(self, result: StepResult, accepted: NDArray[Any], status: NDArray[Any]) -> None:
        for r, i in enumerate(self.sampling.tolist()):
            first = int(self.plan.first_draw[r])
            bad = status[first : first + int(accepted[r])]
            if bad.any():
                result.errors[i] = _ERRORS[int(bad[bad > 0][0])]
