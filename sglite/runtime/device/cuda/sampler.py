"""The sampler's kernels: one launch for a draw, one more where drafts are verified or penalties counted.

top-k, top-p and min-p go through FlashInfer's sorting-free kernels first, which turn the scores into the filtered
distribution; the draw is then made from its logarithm.
"""

from __future__ import annotations

import torch
import triton

from sglite.runtime.device.base import SampleBatch
from sglite.runtime.device.cuda.kernels.sample import draw_kernel, verify_kernel

_FEW_DRAWS = 8
_BLOCK = 1024
_ALIGNED = 16  # int32 words
_WORKSPACE_PARTS = 1 << 16


class CudaSamplerOps:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._values = torch.empty(2 * _WORKSPACE_PARTS, dtype=torch.float32, device=device)
        self._tokens = torch.empty(2 * _WORKSPACE_PARTS, dtype=torch.int32, device=device)
        self._arrived = torch.zeros(_WORKSPACE_PARTS // 8, dtype=torch.int32, device=device)
        self._accepted: torch.Tensor | None = None
        self.filters = True  # False: the kernels before and behind FlashInfer's alone

    def draw(self, logits: torch.Tensor, batch: SampleBatch) -> tuple[torch.Tensor, torch.Tensor]:
        flags, draws = batch.flags, batch.draw_rows.shape[0]
        # One block: one copy to the host. Each part begins at a multiple of 64 bytes: for pointers that do not, Triton
        # compiles the kernels again.
        out = torch.empty(3, -(-draws // _ALIGNED) * _ALIGNED, dtype=torch.int32, device=self._device)[:, :draws]
        tokens, status, self._accepted = out[0], out[1], out[2]
        if not flags.filtered:
            self._launch(logits, batch, tokens, status, None, processed=False)
            return tokens, status
        scores = torch.empty(draws, logits.shape[1], dtype=torch.float32, device=self._device)
        self._launch(logits, batch, tokens, status, scores, processed=False)
        filtered = _filter(scores, batch) if self.filters else scores
        spare = torch.empty_like(status)  # the verdict over the logits is in: filtering adds none
        self._launch(filtered, batch, tokens, spare, None, processed=True)
        return tokens, status

    def verify(self, tokens: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
        accepted, flags = self._accepted, batch.flags
        assert accepted is not None, "verify() without draw()"
        rows = batch.rows.shape[0]
        if flags.drafts or flags.penalized:
            verify_kernel[(rows,)](
                tokens, batch.draft_ids, batch.rows, batch.first_draw, batch.num_draws, batch.count_slots, batch.counts,
                accepted, batch.last_tokens, batch.counts.stride(0), PENALIZED=flags.penalized, num_warps=1,
            )  # fmt: skip
        return accepted[:rows]

    def _launch(
        self,
        logits: torch.Tensor,
        batch: SampleBatch,
        tokens: torch.Tensor,
        status: torch.Tensor,
        scores: torch.Tensor | None,
        *,
        processed: bool,  # logits are the scores of the draws, ready but for noise
    ) -> None:
        flags, draws = batch.flags, tokens.shape[0]
        blocks = triton.next_power_of_2(triton.cdiv(logits.shape[1], _BLOCK))
        splits = min(blocks, 64 if draws <= _FEW_DRAWS else 8)
        index = self._identity(draws) if processed else batch.logits_index
        temperature = self._ones_where_random(batch) if processed else batch.temperature
        draw_kernel[(draws, splits)](
            logits, index, batch.mask_index, batch.keys, temperature, batch.masks, batch.counts, batch.count_slots,
            batch.presence, batch.frequency, batch.repetition, batch.bias, batch.bias_slots, batch.draft_ids,
            batch.draw_rows, self._values, self._tokens, self._arrived, tokens, status, self._accepted,
            batch.last_tokens, logits if scores is None else scores, logits.shape[1], logits.stride(0),
            batch.masks.stride(0), batch.counts.stride(0),
            SPLITS=splits, BLOCK=_BLOCK, MASKED=flags.masked and not processed, RANDOM=flags.random,
            PENALIZED=flags.penalized and not processed, BIASED=flags.biased and not processed, DRAFTS=flags.drafts,
            SCORES=scores is not None,
        )  # fmt: skip

    def _identity(self, draws: int) -> torch.Tensor:
        return torch.arange(draws, dtype=torch.int32, device=self._device)

    @staticmethod
    def _ones_where_random(batch: SampleBatch) -> torch.Tensor:
        return (batch.temperature > 0).float()


@torch.inference_mode()
def load_filters(device: torch.device) -> None:
    """Import FlashInfer and run its kernels once, which loads them."""
    with torch.cuda.stream(torch.cuda.Stream(device)):
        scores = torch.ones(1, 64, dtype=torch.float32, device=device)
        one = torch.ones(1, dtype=torch.int32, device=device)
        _renormed(scores.softmax(-1), one, one.float())
        torch.cuda.current_stream(device).synchronize()


def _renormed(probabilities: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    from flashinfer.sampling import top_k_renorm_probs, top_p_renorm_probs  # when needed: it takes seconds to import

    return top_p_renorm_probs(top_k_renorm_probs(probabilities, top_k), top_p)


def _filter(scores: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
    """scores: float32[S, V], divided by the temperature. Log probabilities of what the filters leave, -inf elsewhere;
    greedy draws keep their scores."""
    probabilities = _renormed(scores.softmax(-1), batch.top_k, batch.top_p)
    least = probabilities.amax(-1, keepdim=True) * batch.min_p[:, None]
    filtered = torch.where(probabilities >= least, probabilities, 0.0).log()
    return torch.where((batch.temperature > 0)[:, None], filtered, scores)
