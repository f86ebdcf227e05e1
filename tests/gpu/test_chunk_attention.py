"""Attention of several new tokens a row against attention in float32."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

from sglite.runtime.device.cuda.kernels.chunk_attention import chunk_attention_kernel
from tests.gpu.kernels import DEVICE, DTYPE, ON_GPU, TOLERANCE, error, random

EPS = 1e-6
PADDING = 2


@dataclass
class Step:
    """`rows`: (cached, new) tokens of each. All keys and values are in their slots; padding tokens come last."""

    heads: int
    kv_heads: int
    dim: int
    page_size: int
    qk_norm: bool
    rows: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        lengths = [cached + new for cached, new in self.rows]
        pages = [-(-length // self.page_size) for length in lengths]
        slots = sum(pages) * self.page_size
        self.k, self.v = random(slots, self.kv_heads, self.dim), random(slots, self.kv_heads, self.dim)
        order = torch.randperm(len(self.rows)).tolist()  # row 0 of the table is not the first
        table = torch.zeros(len(self.rows), max(pages), dtype=torch.int32)
        free = torch.randperm(sum(pages)).int().split(pages)
        token_rows, positions = [], []
        for row, mine, (cached, new) in zip(order, free, self.rows, strict=True):
            table[row, : len(mine)] = mine
            token_rows += [row] * new
            positions += list(range(cached, cached + new))
        self.count = len(positions)
        self.table = table.to(DEVICE)
        self.token_rows = torch.tensor(token_rows + [0] * PADDING, dtype=torch.int32, device=DEVICE)
        self.positions = torch.tensor(positions + [-1] * PADDING, dtype=torch.int32, device=DEVICE)
        self.qkv = random(self.count + PADDING, (self.heads + 2 * self.kv_heads) * self.dim, scale=2.0)
        self.gain = (torch.rand(self.dim) + 0.5).to(DTYPE).to(DEVICE)
        angles = torch.outer(torch.arange(4096).float(), 1e4 ** (-torch.arange(0, self.dim, 2).float() / self.dim))
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], -1).to(DEVICE)

    def attend(self, tokens: int, splits: int) -> torch.Tensor:
        n, group = len(self.positions), self.heads // self.kv_heads
        out = torch.full((n, self.heads * self.dim), 7.0, dtype=DTYPE, device=DEVICE)
        part = torch.full((n * self.heads * splits * self.dim,), math.nan, device=DEVICE)
        stat = torch.full((n * self.heads * splits,), math.nan, device=DEVICE)
        count = torch.zeros(n * self.kv_heads, dtype=torch.int32, device=DEVICE)
        pdl = {"launch_pdl": True} if ON_GPU else {}
        chunk_attention_kernel[(n, splits, self.kv_heads)](
            self.qkv, self.gain, self.cos_sin, self.k, self.v, self.table, self.token_rows, self.positions, out, part,
            stat, count, self.table.stride(0), EPS, self.dim**-0.5 * math.log2(math.e),
            HKV=self.kv_heads, GROUP=group, TOKENS=tokens, BLOCK_M=max(16, 1 << (tokens * group - 1).bit_length()),
            D=self.dim, BLOCK_T=32 if ON_GPU else 16, SPLITS=splits, CHUNK=4, LOOK=1 << (n - 1).bit_length(),
            PAGE_SIZE=self.page_size, STAGES=2, QK_NORM=self.qk_norm, PDL=ON_GPU, **pdl,
        )  # fmt: skip
        assert not count.any(), "the counters must be back at 0"
        return out

    def want(self, n: int) -> torch.Tensor:
        position = int(self.positions[n])
        q = self.qkv[n].view(-1, self.dim)[: self.heads].float()
        if self.qk_norm:
            q = q * torch.rsqrt(q.pow(2).mean(-1, keepdim=True) + EPS) * self.gain.float()
        cos, sin = self.cos_sin[position].chunk(2)
        a, b = q.chunk(2, -1)
        q = torch.cat([a * cos - b * sin, b * cos + a * sin], -1).view(self.kv_heads, -1, self.dim)
        token = torch.arange(position + 1, device=DEVICE)
        at = (self.table[self.token_rows[n], token // self.page_size] * self.page_size + token % self.page_size).long()
        weights = (torch.einsum("hgd,thd->hgt", q, self.k[at].float()) * self.dim**-0.5).softmax(-1)
        return torch.einsum("hgt,thd->hgd", weights, self.v[at].float()).reshape(-1)


STEPS = [
    Step(16, 8, 128, 1, True, ((320, 8),)),
    Step(9, 3, 64, 1, False, ((0, 3), (15, 1), (100, 17), (31, 2), (400, 8))),
    Step(32, 8, 128, 4, True, ((63, 5), (1000, 1), (0, 40), (1, 2))),
    Step(8, 8, 256, 1, False, ((31, 1), (32, 33), (5, 2))),
]
if not ON_GPU:
    STEPS = [
        Step(3, 1, 16, 1, True, ((0, 3), (40, 7))),
        Step(4, 2, 16, 4, False, ((15, 2), (0, 1), (33, 5))),
    ]


@pytest.mark.parametrize("step", STEPS, ids=lambda s: f"{s.heads}-{s.kv_heads}-{s.dim}")
@pytest.mark.parametrize(("tokens", "splits"), [(4, 1), (5, 4), (8, 32)] if ON_GPU else [(3, 1), (4, 4)])
def test_each_new_token_attends_up_to_itself(step: Step, tokens: int, splits: int) -> None:
    out = step.attend(tokens, splits)
    for n in range(step.count):
        assert error(out[n], step.want(n)) < TOLERANCE, f"token {n} of row {int(step.token_rows[n])}"
    assert (out[step.count :] == 7).all(), "padding tokens are left alone"
