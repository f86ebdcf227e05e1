from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

from sglite.runtime.device.cuda.attention import choose_splits
from sglite.runtime.device.cuda.kernels.attention import decode_attention_kernel, norm_rope_append_kernel
from tests.gpu.kernels import DEVICE, DTYPE, ON_GPU, TOLERANCE, error, random

LENGTHS = [0, 1, 37, 100, 63, -1] if ON_GPU else [0, 19, -1]  # cached tokens of each row; -1 is padding
EPS = 1e-6


@dataclass
class Rows:
    """Rows of random pages with one new token each."""

    heads: int
    kv_heads: int
    dim: int
    page_size: int
    qk_norm: bool

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        slots = 400
        self.k, self.v = random(slots, self.kv_heads, self.dim), random(slots, self.kv_heads, self.dim)
        self.table = torch.zeros(8, 128 // self.page_size, dtype=torch.int32)
        self.rows = torch.tensor([3, 1, 0, 7, 5, 2][: len(LENGTHS)], dtype=torch.int32)
        free = torch.randperm(slots // self.page_size).int()
        new, used = [], 0
        for row, length in zip(self.rows.tolist(), LENGTHS, strict=True):
            count = -(-(length + 1) // self.page_size)
            self.table[row, :count] = free[used : used + count]
            used += count
            page = int(self.table[row, length // self.page_size])
            new.append(page * self.page_size + length % self.page_size if length >= 0 else -1)
        self.starts = torch.tensor(LENGTHS, dtype=torch.int32)
        self.new = torch.tensor(new, dtype=torch.int32)
        self.qkv = random(len(LENGTHS), (self.heads + 2 * self.kv_heads) * self.dim)
        self.gains = [(torch.rand(self.dim) + 0.5).to(DTYPE) for _ in range(2)]
        angles = torch.outer(torch.arange(256).float(), 1e4 ** (-torch.arange(0, self.dim, 2).float() / self.dim))
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], -1)
        for name in ("table", "rows", "starts", "new", "cos_sin"):
            setattr(self, name, getattr(self, name).to(DEVICE))
        self.gains = [gain.to(DEVICE) for gain in self.gains]

    def rotated(self, x: torch.Tensor, position: int, gain: torch.Tensor) -> torch.Tensor:
        x = x.float()
        if self.qk_norm:
            x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * gain.float()
        cos, sin = self.cos_sin[position].chunk(2)
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def want(self, i: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Attention output of row i, and its new key and value."""
        length = LENGTHS[i]
        parts = self.qkv[i].view(-1, self.dim)
        q, k, v = parts.split([self.heads, self.kv_heads, self.kv_heads])
        position = torch.arange(length + 1, device=DEVICE)
        at = (self.table[self.rows[i], position // self.page_size] * self.page_size + position % self.page_size).long()
        keys, values = self.k[at].float(), self.v[at].float()
        keys[-1], values[-1] = self.rotated(k, length, self.gains[1]).to(DTYPE).float(), v.float()
        grouped = self.rotated(q, length, self.gains[0]).view(self.kv_heads, -1, self.dim)
        weights = (torch.einsum("hgd,thd->hgt", grouped, keys) * self.dim**-0.5).softmax(-1)
        return torch.einsum("hgt,thd->hgd", weights, values).reshape(-1), keys[-1], values[-1]

    def attend(self, splits: int, k: torch.Tensor, v: torch.Tensor, *, append: bool) -> torch.Tensor:
        rows = len(LENGTHS)
        out = torch.full((rows, self.heads * self.dim), 7.0, dtype=DTYPE, device=DEVICE)
        part = torch.full((rows * self.heads * splits * self.dim,), math.nan, device=DEVICE)
        stat = torch.full((rows * self.heads * splits * 2,), math.nan, device=DEVICE)
        count = torch.zeros(rows * self.kv_heads, dtype=torch.int32, device=DEVICE)
        pdl = {"launch_pdl": True} if ON_GPU else {}
        decode_attention_kernel[(rows, splits, self.kv_heads)](
            self.qkv, *self.gains, self.cos_sin, k, v, self.table, self.rows, self.starts, self.new, out, part, stat,
            count, self.table.stride(0), EPS, self.dim**-0.5 * math.log2(math.e),
            HKV=self.kv_heads, GROUP=self.heads // self.kv_heads, BLOCK_G=16, D=self.dim, BLOCK_T=16, SPLITS=splits,
            PAGE_SIZE=self.page_size, STAGES=2, QK_NORM=self.qk_norm, APPEND=append, PDL=ON_GPU, **pdl,
        )  # fmt: skip
        assert not count.any(), "the counters must be back at 0"
        return out

    def append(
        self, k: torch.Tensor, v: torch.Tensor, q: torch.Tensor | None, keys: torch.Tensor | None = None
    ) -> None:
        heads = 2 * self.kv_heads + (0 if q is None else self.heads)
        norm_rope_append_kernel[(heads, 2)](
            self.qkv, *self.gains, self.cos_sin, self.starts, self.new, self.qkv if q is None else q,
            self.qkv if keys is None else keys, k, v, len(LENGTHS), EPS, HQ=self.heads, HKV=self.kv_heads, D=self.dim,
            BLOCK_T=4, QK_NORM=self.qk_norm, QUERIES=q is not None, KEYS=keys is not None, PDL=ON_GPU,
        )  # fmt: skip


SHAPES = [Rows(6, 2, 64, 1, True), Rows(6, 2, 64, 4, False), Rows(8, 2, 128, 1, True)]
if not ON_GPU:
    SHAPES = [Rows(3, 1, 16, 1, True), Rows(6, 2, 16, 4, False)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("splits", [1, 4, 16] if ON_GPU else [1, 2])
def test_decode_attention_appends_and_attends(shape: Rows, splits: int) -> None:
    k, v = shape.k.clone(), shape.v.clone()
    out = shape.attend(splits, k, v, append=True)
    for i, length in enumerate(LENGTHS):
        if length < 0:
            assert (out[i] == 7).all(), "padding rows are left alone"
            continue
        want, key, value = shape.want(i)
        assert error(out[i], want) < TOLERANCE
        assert error(k[shape.new[i]], key) < TOLERANCE
        assert torch.equal(v[shape.new[i]].float(), value)
    others = torch.ones(len(k), dtype=torch.bool, device=DEVICE)
    others[shape.new[:-1].long()] = False
    assert torch.equal(k[others], shape.k[others]), "no other slot is written"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("splits", [1, 2])
def test_appending_first_gives_the_same(shape: Rows, splits: int) -> None:
    together, apart = (shape.k.clone(), shape.v.clone()), (shape.k.clone(), shape.v.clone())
    want = shape.attend(splits, *together, append=True)
    shape.append(*apart, None)
    got = shape.attend(splits, *apart, append=False)
    assert torch.equal(together[0], apart[0]) and torch.equal(together[1], apart[1])
    assert error(got[:-1], want[:-1]) < 1e-3


def test_keys_and_values_alone_are_appended_like_beside_queries() -> None:
    shape = SHAPES[0]
    want, got = (shape.k.clone(), shape.v.clone()), (shape.k.clone(), shape.v.clone())
    shape.append(*want, None)
    keys_values = shape.qkv[:, shape.heads * shape.dim :].contiguous()
    norm_rope_append_kernel[(2 * shape.kv_heads, 2)](
        keys_values, *shape.gains, shape.cos_sin, shape.starts, shape.new, keys_values, keys_values, *got, len(LENGTHS),
        EPS, HQ=0, HKV=shape.kv_heads, D=shape.dim, BLOCK_T=4, QK_NORM=shape.qk_norm, QUERIES=False, KEYS=False,
        PDL=ON_GPU,
    )  # fmt: skip
    assert torch.equal(want[0], got[0]) and torch.equal(want[1], got[1])


def test_append_writes_rotated_queries_and_keys() -> None:
    shape = SHAPES[0]
    q = torch.zeros(len(LENGTHS), shape.heads, shape.dim, dtype=DTYPE, device=DEVICE)
    keys = torch.zeros(len(LENGTHS), shape.kv_heads, shape.dim, dtype=DTYPE, device=DEVICE)
    cache = shape.k.clone()
    shape.append(cache, shape.v.clone(), q, keys)
    for i, length in enumerate(LENGTHS[:-1]):
        heads = shape.qkv[i].view(-1, shape.dim)
        assert error(q[i], shape.rotated(heads[: shape.heads], length, shape.gains[0])) < TOLERANCE
        assert torch.equal(keys[i], cache[shape.new[i].long()])


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 8, 32])
def test_splits_fit_the_workspace(kv_heads: int) -> None:
    for tokens in (1, 2, 7, 31, 64, 300, 512):
        for longest in (0, 1, 100, 1000, 5000, 100000):
            splits = choose_splits(tokens, kv_heads, longest)
            assert splits & (splits - 1) == 0
            assert splits == 1 or tokens * splits <= 2 * max(64, 2048 // kv_heads)
