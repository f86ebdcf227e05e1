"""Log probabilities for the rows that asked, from the model's own distribution: no temperature, no penalties."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_BLOCK = 64  # rows at a time: a float32 copy of a whole chunk's logits would be larger than the weights


@dataclass(slots=True)
class Logprobs:
    """Of P positions: of the chosen ids, and the best ones. `masked`: over the allowed tokens alone."""

    chosen: torch.Tensor  # float32[P]
    masked: torch.Tensor | None  # float32[P]
    top_ids: torch.Tensor  # int32[P, k]
    top: torch.Tensor  # float32[P, k]


def logprobs_of(logits: torch.Tensor, ids: torch.Tensor, top: int, allowed: torch.Tensor | None = None) -> Logprobs:
    """logits: [P, vocab] of any float type, ids: int[P] the chosen tokens, allowed: bool[P, vocab] or None.

    A chosen token outside `allowed` has a masked logprob of -inf.
    """
    spans = [slice(i, i + _BLOCK) for i in range(0, logits.shape[0], _BLOCK)]
    blocks = [_block(logits[s].float(), ids[s], top, None if allowed is None else allowed[s]) for s in spans]
    return Logprobs(
        torch.cat([b.chosen for b in blocks]),
        None if allowed is None else torch.cat([b.masked for b in blocks if b.masked is not None]),
        torch.cat([b.top_ids for b in blocks]),
        torch.cat([b.top for b in blocks]),
    )


def _block(logits: torch.Tensor, ids: torch.Tensor, top: int, allowed: torch.Tensor | None) -> Logprobs:
    total = logits.logsumexp(-1)
    chosen = logits.gather(1, ids.long()[:, None])[:, 0]
    masked = None
    if allowed is not None:
        visible = logits.masked_fill(~allowed, -torch.inf)
        masked = visible.gather(1, ids.long()[:, None])[:, 0] - visible.logsumexp(-1)
    best, best_ids = logits.topk(top, dim=-1)
    return Logprobs(chosen - total, masked, best_ids.int(), best - total[:, None])
