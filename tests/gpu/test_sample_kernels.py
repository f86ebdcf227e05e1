from __future__ import annotations

import numpy as np
import pytest
import torch

from sglite.runtime.device.base import (
    SEEN_IN_PROMPT,
    STATUS_EMPTY_MASK,
    STATUS_NAN,
    SampleBatch,
    SampleFlags,
    SamplePlan,
)
from sglite.runtime.device.cuda.sampler import CudaSamplerOps
from sglite.runtime.executor.logits.draw import TorchSamplerOps
from sglite.runtime.executor.logits.noise import noise_keys
from tests.gpu.kernels import DEVICE, ON_GPU

# The interpreter computes with numpy, which warns where a GPU goes to infinity.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

VOCAB = 152_001 if ON_GPU else 3000
NUM_DRAWS = [1, 3, 1, 2]
S, R = sum(NUM_DRAWS), len(NUM_DRAWS)


def int32(values: object) -> np.ndarray:
    return np.asarray(values, np.int32)


def make_batch(
    *, masked: bool = False, random: bool = False, penalized: bool = False, biased: bool = False, filtered: bool = False
) -> SampleBatch:
    torch.manual_seed(1)
    rng = np.random.default_rng(0)
    first = int32(np.cumsum(NUM_DRAWS) - NUM_DRAWS)
    drafts = int32([-1, 5, 6, -1, -1, 7, -1])
    slots = int32(np.repeat([1, -1, 0, 2], NUM_DRAWS))
    off = np.full(S, -1, np.int32)
    plan = SamplePlan(
        flags=SampleFlags(masked, random, filtered, penalized, biased, drafts=True),
        rows=int32([4, 0, 2, 9]),
        first_draw=first,
        num_draws=int32(NUM_DRAWS),
        logits_index=int32(rng.permutation(S + 2)[:S]),
        draw_rows=int32(np.repeat([4, 0, 2, 9], NUM_DRAWS)),
        draft_ids=drafts,
        mask_index=int32([2, 0, -1, 1, 3, -1, 4]) if masked else off,
        keys=noise_keys(rng.integers(0, 2**63, S).astype(np.uint64), int32(range(S))),
        temperature=np.float32([0.0, 0.7, 0.7, 0.7, 1.3, 1.0, 1.0]) if random else np.zeros(S, np.float32),
        top_p=np.float32([1, 0.6, 0.6, 0.6, 1, 0.9, 0.9]) if filtered else np.ones(S, np.float32),
        min_p=np.float32([0, 0, 0, 0, 0, 0.05, 0.05]) if filtered else np.zeros(S, np.float32),
        top_k=int32([VOCAB, VOCAB, VOCAB, VOCAB, 20, 50, 50]) if filtered else np.full(S, VOCAB, np.int32),
        presence=np.full(S, 0.3, np.float32),
        frequency=np.full(S, 0.2, np.float32),
        repetition=np.full(S, 1.2, np.float32),
        count_slots=slots if penalized else off,
        bias_slots=slots if biased else off,
    )
    counts = torch.zeros(3, VOCAB, dtype=torch.int32)
    counts[torch.rand(3, VOCAB) < 0.2] = 2
    counts[torch.rand(3, VOCAB) < 0.2] += SEEN_IN_PROMPT
    masks = torch.randint(-(2**31), 2**31 - 1, (5, -(-VOCAB // 32)), dtype=torch.int32)
    arrays = {
        name: torch.from_numpy(getattr(plan, name)).to(DEVICE)
        for name in SampleBatch.__dataclass_fields__
        if isinstance(getattr(plan, name, None), np.ndarray)
    }
    return SampleBatch(
        flags=plan.flags, plan=plan, **arrays, masks=masks.to(DEVICE), counts=counts.to(DEVICE),
        bias=(torch.randn(3, VOCAB) * 3).to(DEVICE),
        last_tokens=torch.full((12,), -5, dtype=torch.int32, device=DEVICE),
    )  # fmt: skip


def make_logits() -> torch.Tensor:
    torch.manual_seed(2)
    return (torch.randn(S + 2, VOCAB + 64) * 4).to(DEVICE)[:, :VOCAB]


FLAGS = [
    {},
    {"masked": True},
    {"random": True},
    {"masked": True, "random": True, "penalized": True, "biased": True},
    {"random": True, "filtered": True},
    {"masked": True, "random": True, "filtered": True, "penalized": True},
]


@pytest.mark.parametrize("flags", FLAGS if ON_GPU else FLAGS[:4], ids=lambda flags: "-".join(flags) or "greedy")
def test_draws_are_those_of_the_portable_sampler(flags: dict[str, bool]) -> None:
    logits = make_logits()
    ours, theirs = make_batch(**flags), make_batch(**flags)
    before = logits.clone()
    tokens, status = CudaSamplerOps(torch.device(DEVICE)).draw(logits, ours)
    want, want_status = TorchSamplerOps().draw(logits, theirs)
    assert torch.equal(logits, before), "log probabilities come from the logits afterwards"
    assert tokens.tolist() == want.tolist()
    assert status.tolist() == want_status.tolist() == [0] * S


def test_ties_go_to_the_lowest_id() -> None:
    logits = torch.zeros(S + 2, VOCAB, device=DEVICE)
    logits[:, [VOCAB - 1, 1500, 77]] = 3.0
    tokens, _ = CudaSamplerOps(torch.device(DEVICE)).draw(logits, make_batch())
    assert tokens.tolist() == [77] * S


def test_what_cannot_be_drawn_is_reported_for_its_row_alone() -> None:
    logits, batch = make_logits(), make_batch(masked=True)
    index = batch.plan.logits_index
    logits[index[2], 1234] = torch.nan
    logits[index[5]] = -torch.inf
    batch.masks[2] = 0
    _, status = CudaSamplerOps(torch.device(DEVICE)).draw(logits, batch)
    assert status.tolist() == [STATUS_EMPTY_MASK, 0, STATUS_NAN, 0, 0, STATUS_NAN, 0]


def test_the_only_allowed_token_wins_whatever_its_logit() -> None:
    logits, batch = make_logits(), make_batch(masked=True, random=True)
    logits[batch.plan.logits_index[0], 70] = -torch.inf
    batch.masks[2] = 0
    batch.masks[2, 70 // 32] = 1 << (70 % 32)
    tokens, status = CudaSamplerOps(torch.device(DEVICE)).draw(logits, batch)
    assert (int(tokens[0]), int(status[0])) == (70, 0)


@pytest.mark.parametrize("penalized", [False, True])
@pytest.mark.parametrize("drawn", [[1, 5, 6, 8, 2, 7, 3], [1, 5, 9, 8, 2, 4, 3], [1, 0, 6, 8, 2, 7, 3]])
def test_drafts_are_accepted_while_they_agree(penalized: bool, drawn: list[int]) -> None:
    ours, theirs = make_batch(penalized=penalized), make_batch(penalized=penalized)
    tokens = torch.tensor(drawn, dtype=torch.int32, device=DEVICE)
    ops = CudaSamplerOps(torch.device(DEVICE))
    ops.draw(make_logits(), ours)
    accepted = ops.verify(tokens, ours)
    assert accepted.tolist() == TorchSamplerOps().verify(tokens, theirs).tolist()
    assert torch.equal(ours.last_tokens, theirs.last_tokens)
    assert torch.equal(ours.counts, theirs.counts)
