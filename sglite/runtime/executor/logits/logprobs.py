"""Log probabilities from the model's own distribution: no temperature, no penalties."""

from __future__ import annotations

import torch

_BLOCK = 64  # rows at a time: a float32 copy of a whole chunk's logits could be larger than the weights


def chosen_logprobs(
    logits: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor, allowed: torch.Tensor | None = None
) -> torch.Tensor:
    """float32[K]: of ids[j]  # int[K]  at logits[positions[j]]; logits: [P, vocab] of any float type.

    allowed: bool[P, vocab]: over these tokens alone; -inf for an id that is not among them.
    """
    totals = []
    for first in range(0, logits.shape[0], _BLOCK):
        block = logits[first : first + _BLOCK].float()
        if allowed is not None:
            block = block.masked_fill(~allowed[first : first + _BLOCK], -torch.inf)
        totals.append(block.logsumexp(-1))
    positions, ids = positions.long(), ids.long()
    chosen = logits[positions, ids].float() - torch.cat(totals)[positions]
    return chosen if allowed is None else chosen.masked_fill(~allowed[positions, ids], -torch.inf)


def logprobs_at(logits: torch.Tensor, rows: torch.Tensor, at: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """float32[K]: of ids[j] at logits[rows[at[j]]]; logits: [P, vocab], rows: int64[R], at, ids: int64[K]."""
    totals = []
    for some in rows.split(_BLOCK):
        totals.append(logits[some].float().logsumexp(-1))
    return logits[rows[at], ids].float() - torch.cat(totals)[at]


def top_logprobs(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(logprobs float32[P, k], ids int32[P, k]), best first."""
    values, ids = [], []
    for first in range(0, logits.shape[0], _BLOCK):
        block = logits[first : first + _BLOCK].float()
        best, best_ids = block.topk(min(k, block.shape[1]), dim=-1)
        values.append(best - block.logsumexp(-1, keepdim=True))
        ids.append(best_ids.int())
    return torch.cat(values), torch.cat(ids)
