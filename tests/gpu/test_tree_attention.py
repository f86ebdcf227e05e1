"""The kernels of tree attention against attention in float32, over groups and rows of all sorts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from sglite.runtime.device.cuda.kernels.tree_attention import (
    merge_kernel,
    prefix_attention_kernel,
    suffix_attention_kernel,
)
from sglite.runtime.device.cuda.tree_plan import Cut, Group, TreePlan, make_plan
from tests.gpu.kernels import DEVICE, DTYPE, ON_GPU, TOLERANCE, error, random

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
        for i, group in enumerate(self.group_of):
            pages = list(shared_pages[group]) if group >= 0 else []
            pages += [next(free) for _ in range(needed[i] - len(pages))]
            self.table[self.rows[i], : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        self.starts = torch.tensor([*self.lengths, -1], dtype=torch.int32)
        self.k, self.v = random(slots, self.kv_heads, self.dim), random(slots, self.kv_heads, self.dim)
        self.q = random(count + 1, self.heads, self.dim, scale=2.0)
        for name in ("table", "rows", "starts"):
            setattr(self, name, getattr(self, name).to(DEVICE))

    def plan(self, block_m: int, chunk: int) -> TreePlan:
        groups = [
            Group(length, np.flatnonzero(np.array(self.group_of) == g).astype(np.int32))
            for g, (length, _) in enumerate(self.groups)
        ]
        per_tile = block_m * self.kv_heads // self.heads
        return make_plan(groups, self.rows.cpu().numpy(), Cut(block_m, per_tile, chunk, 0))

    def attend(self, plan: TreePlan, splits: int) -> torch.Tensor:
        rows, key, group = len(self.starts), plan.key, self.heads // self.kv_heads
        out = torch.full((rows, self.heads * self.dim), 7.0, dtype=DTYPE, device=DEVICE)
        place = (key.items, self.kv_heads, key.block_m)
        prefix_part = torch.full((*place, self.dim), math.nan, dtype=DTYPE, device=DEVICE)
        prefix_stat = torch.full(place, math.nan, device=DEVICE)
        part = torch.full((rows, splits, self.heads, self.dim), math.nan, dtype=DTYPE, device=DEVICE)
        stat = torch.full((rows, splits, self.heads), math.nan, device=DEVICE)
        items = np.zeros((key.items, plan.items.shape[1]), np.int32)
        items[: len(plan.items)] = plan.items
        device_items, shares, members = (torch.from_numpy(a).to(DEVICE) for a in (items, plan.shares, plan.members))
        scale = self.dim**-0.5 * math.log2(math.e)
        pdl = {"launch_pdl": True} if ON_GPU else {}
        prefix_attention_kernel[(key.items, self.kv_heads)](
            self.q, self.k, self.v, self.table, members, device_items, prefix_part, prefix_stat, self.table.stride(0),
            scale,
            HKV=self.kv_heads, GROUP=group, D=self.dim, BLOCK_M=key.block_m, BLOCK_T=BLOCK_T, PAGE_SIZE=self.page_size,
            STAGES=3, PDL=ON_GPU, num_warps=key.block_m // 16, **pdl,
        )  # fmt: skip
        suffix_attention_kernel[(rows, splits, self.kv_heads)](
            self.q, self.k, self.v, self.table, self.rows, self.starts, shares, part, stat, self.table.stride(0), scale,
            HKV=self.kv_heads, GROUP=group, BLOCK_G=16, D=self.dim, BLOCK_T=16, SPLITS=splits,
            PAGE_SIZE=self.page_size, STAGES=2, PDL=ON_GPU, num_warps=1, **pdl,
        )  # fmt: skip
        merge_kernel[(rows, self.kv_heads)](
            self.starts, shares, part, stat, prefix_part, prefix_stat, out,
            HKV=self.kv_heads, GROUP=group, HEADS=1 << (group - 1).bit_length(), D=self.dim, BLOCK_M=key.block_m,
            SPLITS=splits, OWN=min(splits, 2), CHUNK=8, PDL=ON_GPU, num_warps=1, **pdl,
        )  # fmt: skip
        return out

    def want(self, i: int) -> torch.Tensor:
        """Attention output of row i."""
        position = torch.arange(self.lengths[i] + 1, device=DEVICE)
        at = (self.table[self.rows[i], position // self.page_size] * self.page_size + position % self.page_size).long()
        keys, values = self.k[at].float(), self.v[at].float()
        grouped = self.q[i].float().view(self.kv_heads, -1, self.dim)
        weights = (torch.einsum("hgd,thd->hgt", grouped, keys) * self.dim**-0.5).softmax(-1)
        return torch.einsum("hgt,thd->hgd", weights, values).reshape(-1)


SMALL = [
    Tree(4, 2, 16, [(50, [0, 3, 20]), (33, [17, 1])], [0, 21]),  # GQA 2; a suffix of the new token alone
    Tree(3, 1, 16, [(48, [5] * 7)], []),  # 3; a whole number of tiles
    Tree(2, 2, 16, [(20, [0, 40])], [5], page_size=4),  # 1
    Tree(8, 1, 16, [(20, [1, 2, 3])], []),  # 8
    Tree(4, 2, 16, [(16, [0] * 9), (15, [1, 2]), (17, [0, 16]), (1, [15, 3])], [15]),  # at the bounds of all tiles
]
LARGE = [
    Tree(6, 2, 64, [(300, [0, 3, 20] * 4), (1000, [17, 1])], [0, 21, 700]),
    Tree(32, 8, 128, [(2048, [5, 90, 0, 200] * 5)], []),
    Tree(16, 8, 128, [(1111, list(range(64)))], [2000, 3]),
    Tree(2, 2, 64, [(516, [0, 40, 80])], [5], page_size=4),
    Tree(32, 4, 64, [(400, [1, 2, 3]), (800, [1] * 30), (256, [300, 400])], []),
    Tree(4, 4, 128, [(5000, [9] * 100)], [100]),
    Tree(8, 2, 64, [(64, [0] * 33), (63, [1, 64]), (65, [0, 63]), (1, [65, 3]), (512, [64] * 16)], [63, 64, 0]),
]


@pytest.mark.parametrize("tree", LARGE if ON_GPU else SMALL, ids=lambda t: f"{t.heads}-{t.kv_heads}-{t.dim}")
@pytest.mark.parametrize(
    ("block_m", "chunk", "splits"),
    [(64, 512, 1), (128, 256, 4), (64, 256, 16)] if ON_GPU else [(16, 32, 1), (32, 16, 4)],
)
def test_rows_that_share_a_prefix_attend_to_all_of_it(tree: Tree, block_m: int, chunk: int, splits: int) -> None:
    out = tree.attend(tree.plan(block_m, chunk), splits)
    for i, (group, length) in enumerate(zip(tree.group_of, tree.lengths, strict=True)):
        assert error(out[i], tree.want(i)) < TOLERANCE, f"row {i} of group {group}, {length} cached"
    assert (out[-1] == 7).all(), "padding rows are left alone"
