"""top-k, top-p and min-p: which tokens a draw may still take."""

from __future__ import annotations

import torch

_CANDIDATES = (128, 1024)  # looked at first: almost every nucleus ends there, at a fraction of the cost of a sort


def filter_tokens(
    scores: torch.Tensor, *, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """scores: float32[S, vocab], already divided by the temperature; top_k int32[S], top_p and min_p float32[S].

    Keeps the k best (ties at the border either way), of these the smallest set of best ones that reaches top_p of
    their probability together, and of these the ones at least min_p times as probable as the best. The best token
    always stays. Returns (scores float32[S, C] with -inf for dropped ones, token ids int32[S, C]).
    """
    for size in _CANDIDATES:
        if size < scores.shape[1]:
            values, ids = scores.topk(size, dim=-1)
            kept, complete = _keep(values, scores, top_k=top_k, top_p=top_p, min_p=min_p)
            if complete:
                return values.masked_fill(~kept, -torch.inf), ids.int()
    values, ids = scores.sort(dim=-1, descending=True, stable=True)
    kept, _ = _keep(values, scores, top_k=top_k, top_p=top_p, min_p=min_p)
    return values.masked_fill(~kept, -torch.inf), ids.int()


def _keep(
    values: torch.Tensor, scores: torch.Tensor, *, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> tuple[torch.Tensor, bool]:
    """values: the C best scores of each row, sorted. (bool[S, C] which stay, whether no row's set goes on behind)."""
    size = values.shape[1]
    ranks = torch.arange(size, device=values.device)
    within_k = ranks < top_k[:, None]
    whole = scores.logsumexp(-1)
    best_k = values.masked_fill(~within_k, -torch.inf).logsumexp(-1)
    total = torch.where(top_k <= size, best_k, whole)  # of what top-k leaves
    probabilities = (values - total[:, None]).exp().masked_fill_(~within_k, 0.0)
    before = probabilities.cumsum(-1) - probabilities
    within_p = before < top_p[:, None]
    likely = values >= values[:, :1] + min_p[:, None].log()
    kept = within_k & within_p & likely
    kept[:, 0] = True
    return kept, size == scores.shape[1] or not bool((kept[:, -1] & (top_k > size)).any())
