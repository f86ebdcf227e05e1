"""Grammar bitmasks on logits. Bit i % 32 of word i // 32 is set where token i may come next."""

from __future__ import annotations

import torch


def allowed_tokens(masks: torch.Tensor, index: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """bool[S, vocab_size] from rows `index`  # int[S]  of masks  # int32[rows, words]; all where the index is -1."""
    words = masks.index_select(0, index.clamp(min=0)).masked_fill_((index < 0)[:, None], -1)
    bits = torch.arange(32, dtype=torch.int32, device=masks.device)
    allowed = (words[:, :, None] >> bits).bitwise_and_(1).bool()
    return allowed.flatten(1)[:, :vocab_size]


def apply_mask(scores: torch.Tensor, allowed: torch.Tensor) -> None:
    """In place: -inf where not allowed. What is allowed becomes finite first, so a mask of one token always wins,
    whatever penalties or the model say; NaN stays NaN.  Both [S, vocab]."""
    limit = torch.finfo(scores.dtype).max
    scores.clamp_(min=-limit, max=limit).masked_fill_(~allowed, -torch.inf)
