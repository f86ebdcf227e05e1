"""The two kernels of tree attention against attention in float32, over groups and rows of all sorts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from sglite.runtime.device.cuda.kernels.tree_attention import prefix_attention_kernel, suffix_attention_kernel
from sglite.runtime.device.cuda.tree_plan import Cut, Group, TreePlan, make_plan
from tests.gpu.kernels import DEVICE, DTYPE, ON_GPU, TOLERANCE, error, random

EPS = 1e-6
BLOCK_T = 64 if ON_GPU else 16


@dataclass
class Tree:
    """Rows with one new token each. `groups`: (tokens of the prefix, own cached tokens of each row); `lonely`: cached
    tokens of rows that share nothing. The rows of all groups are mixed; one row of padding is the last."""

    heads: int
    kv_heads: int
    dim: int
    groups: list[tuple[int, list[int]]]
    lonely: list[int]
    page_size: int = 1
    qk_norm: bool = True

    def __post_init__(self) -> None:
        torch.manual_seed(len(self.groups))
        rng = np.random.default_rng(0)
        shares = [(g, own) for g, (_, rows) in enumerate(self.groups) for own in rows] + [(-1, n) for n in self.lonely]
        shares = [shares[i] for i in rng.permutation(len(shares))]
        self.group_of = [g for g, _ in shares]
        self.lengths = [own + (self.groups[g][0] if g >= 0 else 0) for g, own in shares]
        pages_of_groups = [-(-length // self.page_size) for length, _ in self.groups]
        needed = [-(-(n + 1) // self.page_size) for n in self.lengths]
        slots = (sum(pages_of_groups) + sum(needed)) * self.page_size
        free = iter(torch.randperm(slots // self.page_size).int().tolist())
        shared_pages = [[next(free) for _ in range(count)] for count in pages_of_groups]
        count = len(shares)
        self.table = torch.zeros(count + 1, max(needed), dtype=torch.int32)
        self.rows = torch.from_numpy(rng.permutation(count + 1).astype(np.int32))
        new = []
        for i, (group, length) in enumerate(zip(self.group_of, self.lengths, strict=True)):
            pages = list(shared_pages[group]) if group >= 0 else []
            pages += [next(free) for _ in range(needed[i] - len(pages))]
            self.table[self.rows[i], : len(pages)] = torch.tensor(pages, dtype=torch.int32)
            new.append(pages[length // self.page_size] * self.page_size + length % self.page_size)
        self.new = torch.tensor([*new, -1], dtype=torch.int32)
        self.starts = torch.tensor([*self.lengths, -1], dtype=torch.int32)
        self.k, self.v = random(slots, self.kv_heads, self.dim), random(slots, self.kv_heads, self.dim)
        self.qkv = random(count + 1, (self.heads + 2 * self.kv_heads) * self.dim)
        self.gains = [(torch.rand(self.dim) + 0.5).to(DTYPE).to(DEVICE) for _ in range(2)]
        angles = torch.outer(
            torch.arange(max(self.lengths) + 1).float(), 1e4 ** (-torch.arange(0, self.dim, 2).float() / self.dim)
        )
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], -1)
        for name in ("table", "rows", "starts", "new", "cos_sin"):
            setattr(self, name, getattr(self, name).to(DEVICE))

    def plan(self, block_m: int, chunk: int) -> TreePlan:
        groups = [
            Group(length, np.flatnonzero(np.array(self.group_of) == g).astype(np.int32))
            for g, (length, _) in enumerate(self.groups)
        ]
        per_tile = block_m * self.kv_heads // self.heads
        return make_plan(groups, self.rows.cpu().numpy(), Cut(block_m, per_tile, chunk, 0))

    def attend(
        self, plan: TreePlan, splits: int, k: torch.Tensor, v: torch.Tensor, *, append: bool, warps: int = 4
    ) -> torch.Tensor:
        rows = len(self.starts)
        key = plan.key
        out = torch.full((rows, self.heads * self.dim), 7.0, dtype=DTYPE, device=DEVICE)
        place = (key.items, self.kv_heads, key.block_m)
        prefix_part = torch.full((*place, self.dim), math.nan, dtype=DTYPE, device=DEVICE)
        prefix_stat = torch.full(place, math.nan, device=DEVICE)
        part = torch.full((rows * self.heads * splits * self.dim,), math.nan, device=DEVICE)
        stat = torch.full((rows * self.heads * splits * 2,), math.nan, device=DEVICE)
        count = torch.zeros(rows * self.kv_heads, dtype=torch.int32, device=DEVICE)
        items = np.zeros((key.items, plan.items.shape[1]), np.int32)
        items[: len(plan.items)] = plan.items
        device_items, shares, members = (torch.from_numpy(a).to(DEVICE) for a in (items, plan.shares, plan.members))
        scale, group = self.dim**-0.5 * math.log2(math.e), self.heads // self.kv_heads
        pdl = {"launch_pdl": True} if ON_GPU else {}
        prefix_attention_kernel[(key.items, self.kv_heads)](
            self.qkv, self.gains[0], self.cos_sin, k, v, self.table, self.starts, members, device_items, prefix_part,
            prefix_stat, self.table.stride(0), EPS, scale,
            HKV=self.kv_heads, GROUP=group, D=self.dim, BLOCK_M=key.block_m, BLOCK_T=BLOCK_T, PAGE_SIZE=self.page_size,
            STAGES=3, QK_NORM=self.qk_norm, PDL=ON_GPU, num_warps=key.block_m // 16, **pdl,
        )  # fmt: skip
        suffix_attention_kernel[(rows, splits, self.kv_heads)](
            self.qkv, *self.gains, self.cos_sin, k, v, self.table, self.rows, self.starts, self.new, out, shares,
            prefix_part, prefix_stat, part, stat, count, self.table.stride(0), EPS, scale,
            HKV=self.kv_heads, GROUP=group, BLOCK_G=16, D=self.dim, BLOCK_M=key.block_m, BLOCK_T=16, SPLITS=splits,
            ITEMS=key.parts, PAGE_SIZE=self.page_size, STAGES=2, QK_NORM=self.qk_norm, APPEND=append, PDL=ON_GPU,
            num_warps=warps, **pdl,
        )  # fmt: skip
        assert not count.any(), "the counters must be back at 0"
        return out

    def append(self, k: torch.Tensor, v: torch.Tensor) -> None:
        for i in range(len(self.lengths)):
            _, key, value = self.want(i)
            k[self.new[i].long()], v[self.new[i].long()] = key.to(DTYPE), value.to(DTYPE)

    def rotated(self, x: torch.Tensor, position: int, gain: torch.Tensor) -> torch.Tensor:
        x = x.float()
        if self.qk_norm:
            x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * gain.float()
        cos, sin = self.cos_sin[position].chunk(2)
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def want(self, i: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Attention output of row i, and its new key and value."""
        length = self.lengths[i]
        q, k, v = self.qkv[i].view(-1, self.dim).split([self.heads, self.kv_heads, self.kv_heads])
        position = torch.arange(length + 1, device=DEVICE)
        at = (self.table[self.rows[i], position // self.page_size] * self.page_size + position % self.page_size).long()
        keys, values = self.k[at].float(), self.v[at].float()
        keys[-1], values[-1] = self.rotated(k, length, self.gains[1]).to(DTYPE).float(), v.float()
        grouped = self.rotated(q, length, self.gains[0]).view(self.kv_heads, -1, self.dim)
        weights = (torch.einsum("hgd,thd->hgt", grouped, keys) * self.dim**-0.5).softmax(-1)
        return torch.einsum("hgt,thd->hgd", weights, values).reshape(-1), keys[-1], values[-1]

    def check(self, out: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        for i in range(len(self.lengths)):
            want, key, value = self.want(i)
            assert error(out[i], want) < TOLERANCE, f"row {i} of group {self.group_of[i]}, {self.lengths[i]} cached"
            assert error(k[self.new[i].long()], key) < TOLERANCE
            assert torch.equal(v[self.new[i].long()].float(), value)
        assert (out[-1] == 7).all(), "padding rows are left alone"
        others = torch.ones(len(k), dtype=torch.bool, device=DEVICE)
        others[self.new[:-1].long()] = False
        assert torch.equal(k[others], self.k[others]) and torch.equal(v[others], self.v[others])


SMALL = [
    Tree(4, 2, 16, [(50, [0, 3, 20]), (33, [17, 1])], [0, 21]),  # GQA 2; a suffix of the new token alone
    Tree(3, 1, 16, [(48, [5] * 7)], [], qk_norm=False),  # 3; a whole number of tiles
    Tree(2, 2, 16, [(20, [0, 40])], [5], page_size=4),  # 1
    Tree(8, 1, 16, [(20, [1, 2, 3])], []),  # 8
]
LARGE = [
    Tree(6, 2, 64, [(300, [0, 3, 20] * 4), (1000, [17, 1])], [0, 21, 700]),
    Tree(32, 8, 128, [(2048, [5, 90, 0, 200] * 5)], []),
    Tree(16, 8, 128, [(1111, list(range(64)))], [2000, 3], qk_norm=False),
    Tree(2, 2, 64, [(516, [0, 40, 80])], [5], page_size=4),
    Tree(32, 4, 64, [(400, [1, 2, 3]), (800, [1] * 30), (256, [300, 400])], []),
    Tree(4, 4, 128, [(5000, [9] * 100)], [100]),
]


@pytest.mark.parametrize("tree", LARGE if ON_GPU else SMALL, ids=lambda t: f"{t.heads}-{t.kv_heads}-{t.dim}")
@pytest.mark.parametrize(("block_m", "chunk"), [(64, 512), (128, 256)] if ON_GPU else [(16, 32), (32, 16)])
@pytest.mark.parametrize("splits", [1, 4])
def test_rows_that_share_a_prefix_attend_to_all_of_it(tree: Tree, block_m: int, chunk: int, splits: int) -> None:
    plan = tree.plan(block_m, chunk)
    k, v = tree.k.clone(), tree.v.clone()
    tree.check(tree.attend(plan, splits, k, v, append=True), k, v)


@pytest.mark.parametrize("tree", (LARGE if ON_GPU else SMALL)[:2], ids=lambda t: f"{t.heads}-{t.kv_heads}-{t.dim}")
def test_new_keys_and_values_may_be_in_place_already(tree: Tree) -> None:
    plan = tree.plan(64 if ON_GPU else 16, 256 if ON_GPU else 32)
    k, v = tree.k.clone(), tree.v.clone()
    tree.append(k, v)
    tree.check(tree.attend(plan, 1, k, v, append=False, warps=2), k, v)
