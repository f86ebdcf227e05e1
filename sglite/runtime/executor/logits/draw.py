"""The portable sampler: every step of a draw in torch, on tensors of any device.

Order: bias, penalties, mask, temperature, top-k / top-p / min-p, Gumbel-max. Greedy rows stop after the mask.
"""

from __future__ import annotations

import numpy as np
import torch

from sglite.runtime.batch import IntArray
from sglite.runtime.device.base import (
    STATUS_EMPTY_MASK,
    STATUS_NAN,
    SampleBatch,
)
from sglite.runtime.device.inputs import ranges
from sglite.runtime.executor.logits.bitmask import allowed_tokens, apply_mask
from sglite.runtime.executor.logits.filters import filter_tokens
from sglite.runtime.executor.logits.noise import gumbel_noise
from sglite.runtime.executor.logits.penalties import apply_penalties


class TorchSamplerOps:
    """The twin of every fused sampler."""

    def draw(self, logits: torch.Tensor, batch: SampleBatch) -> tuple[torch.Tensor, torch.Tensor]:
        plan, flags = batch.plan, batch.flags
        scores = logits
        if not np.array_equal(plan.logits_index, np.arange(logits.shape[0])):
            scores = scores.index_select(0, batch.logits_index)
        scores = scores.float()
        if flags.biased:
            scores = _biased(scores, batch)
        if flags.penalized:
            scores = _penalized(scores, batch)
        best = scores.amax(-1)
        status = (best.isnan() | (best == -torch.inf)).int() * STATUS_NAN
        if flags.masked:
            scores, empty = _masked(scores, batch)
            status = torch.where((status == 0) & empty, STATUS_EMPTY_MASK, status)
        if not flags.random:
            return _argmax(scores), status
        greedy, random = np.flatnonzero(plan.temperature == 0), np.flatnonzero(plan.temperature > 0)
        tokens = torch.empty(scores.shape[0], dtype=torch.int32, device=scores.device)
        if len(greedy):
            index = _index(greedy, scores)
            tokens[index] = _argmax(scores.index_select(0, index))
        self._draw_random(scores, batch, random, tokens)  # pyright: ignore[reportArgumentType] - intp indices
        return tokens, status

    def verify(self, tokens: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
        if not batch.flags.drafts:
            accepted = torch.ones_like(batch.rows)
            batch.last_tokens[batch.rows] = tokens
        else:
            steps = torch.arange(int(batch.plan.num_draws.max()) - 1, device=tokens.device, dtype=torch.int32)
            places = (batch.first_draw[:, None] + steps).clamp_(max=tokens.shape[0] - 1)
            agree = (tokens == batch.draft_ids)[places] & (steps < batch.num_draws[:, None] - 1)
            accepted = 1 + agree.int().cumprod(-1).sum(-1, dtype=torch.int32)
            batch.last_tokens[batch.rows] = tokens[batch.first_draw + accepted - 1]
        if batch.flags.penalized:
            _count(tokens, accepted, batch)
        return accepted

    @staticmethod
    def _draw_random(scores: torch.Tensor, batch: SampleBatch, random: IntArray, tokens: torch.Tensor) -> None:
        """Rows with top-k, top-p or min-p draw among sorted candidates, the others over the whole vocabulary."""
        plan = batch.plan
        filtered = (plan.top_p < 1) | (plan.min_p > 0) | (plan.top_k < scores.shape[1])
        ids = torch.arange(scores.shape[1], device=scores.device, dtype=torch.int32)
        for row in random[~filtered[random]].tolist():  # one by one: a row fits the cache
            noisy = gumbel_noise(batch.keys[row : row + 1], ids).addcmul_(
                scores[row : row + 1], batch.temperature[row].reciprocal()
            )
            tokens[row] = _argmax(noisy)[0]
        chosen = random[filtered[random]]
        if len(chosen):
            index = _index(chosen, scores)
            values, candidates = filter_tokens(
                scores.index_select(0, index) / batch.temperature[index, None],
                top_k=batch.top_k[index],
                top_p=batch.top_p[index],
                min_p=batch.min_p[index],
            )
            best = (values + gumbel_noise(batch.keys[index], candidates)).argmax(-1, keepdim=True)
            tokens[index] = candidates.gather(1, best)[:, 0]


def _biased(scores: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
    index = _index(np.flatnonzero(batch.plan.bias_slots >= 0), scores)
    return scores.index_add(0, index, batch.bias.index_select(0, batch.bias_slots[index]))


def _penalized(scores: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
    plan = batch.plan
    chosen = np.flatnonzero(plan.count_slots >= 0)
    index = _index(chosen, scores)
    counts = batch.counts.index_select(0, batch.count_slots[index])
    if batch.flags.drafts:  # draw j counts the j drafts before it as if they were accepted
        first = np.repeat(plan.first_draw, plan.num_draws)[chosen]
        before = chosen.astype(np.int32) - first
        places = _index(np.repeat(np.arange(len(chosen)), before), scores)
        drafts = batch.draft_ids[_index(ranges(first, before), scores)].long()
        counts.index_put_((places, drafts), torch.ones_like(drafts, dtype=torch.int32), accumulate=True)
    penalized = apply_penalties(
        scores.index_select(0, index),
        counts,
        presence=batch.presence[index],
        frequency=batch.frequency[index],
        repetition=batch.repetition[index],
    )
    return scores.index_copy(0, index, penalized)


def _masked(scores: torch.Tensor, batch: SampleBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """(scores, bool[S]: the mask of this draw leaves nothing)."""
    plan = batch.plan
    chosen = np.flatnonzero(plan.mask_index >= 0)
    index = _index(chosen, scores)
    allowed = allowed_tokens(batch.masks, batch.mask_index[index], scores.shape[1])
    rows = scores.index_select(0, index)
    apply_mask(rows, allowed)
    empty = torch.zeros(scores.shape[0], dtype=torch.bool, device=scores.device)
    empty[index] = ~allowed.any(-1)
    if len(chosen) == scores.shape[0]:
        return rows, empty
    return scores.index_copy(0, index, rows), empty


def _count(tokens: torch.Tensor, accepted: torch.Tensor, batch: SampleBatch) -> None:
    """Add the accepted tokens of rows with penalties to their counts."""
    plan = batch.plan
    rank = np.arange(len(plan.draw_rows), dtype=np.int32) - np.repeat(plan.first_draw, plan.num_draws)
    row = np.repeat(np.arange(len(plan.rows)), plan.num_draws)
    chosen = np.flatnonzero(plan.count_slots >= 0)
    index = _index(chosen, tokens)
    taken = (_index(rank[chosen], tokens) < accepted[_index(row[chosen], tokens)]).int()
    batch.counts.index_put_((batch.count_slots[index].long(), tokens[index].long()), taken, accumulate=True)


def _argmax(scores: torch.Tensor) -> torch.Tensor:
    """int32[S]; ties: the lowest id. On the CPU numpy's is 25 times as fast as torch's, which does not vectorise."""
    if scores.device.type == "cpu":
        return torch.from_numpy(scores.numpy().argmax(-1).astype(np.int32))
    return scores.argmax(-1).int()


def _index(host: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(host, dtype=np.int64)).to(like.device)
