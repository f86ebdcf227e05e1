"""Presence, frequency and repetition penalties from token counts, and logit bias from a table."""

from __future__ import annotations

import torch

from sglite.runtime.device.base import SEEN_IN_PROMPT


def apply_penalties(
    scores: torch.Tensor,
    counts: torch.Tensor,
    *,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    repetition: torch.Tensor,
) -> torch.Tensor:
    """New scores. scores: float32[S, vocab], counts: int32[S, vocab] (see SEEN_IN_PROMPT), the others float32[S].

    Repetition counts prompt and output and scales (positive logits divided, negative multiplied), then frequency
    subtracts per output occurrence and presence once.
    """
    outputs = counts.bitwise_and(SEEN_IN_PROMPT - 1)
    factor = repetition[:, None]
    scaled = torch.where(scores > 0, scores / factor, scores * factor)
    scores = torch.where(counts > 0, scaled, scores)
    return scores - frequency[:, None] * outputs - presence[:, None] * (outputs > 0)
