"""The kernels of `deterministic=True` against torch, and a row's bits against those that it has in other company.

Only a run on a GPU proves the second half: the interpreter's products are numpy's, whose bits do change.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sglite.runtime.device.base import AttentionLayer, AttentionShape, KVCache, Norm
from sglite.runtime.device.cuda.inputs import CudaForwardBatch, GraphKey
from sglite.runtime.device.cuda.invariant import InvariantAttention, InvariantOps, query_tiles
from tests.fakes.batches import Part, make_batch
from tests.gpu.kernels import DEVICE, DTYPE, ON_GPU, TOLERANCE, error, random

ROWS = [1, 2, 16, 17, 33, 64, 65, 130, 300] if ON_GPU else [1, 5, 70]
SHAPES = [(1000, 576), (512, 1024), (256, 1536)] if ON_GPU else [(72, 96)]  # outputs, inputs
OPS = InvariantOps(pdl=ON_GPU)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a, b) if ON_GPU else error(a, b) < TOLERANCE


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_right_and_a_row_has_the_same_bits_in_any_company(shape: tuple[int, int], bias: bool) -> None:
    torch.manual_seed(0)
    outputs, inputs = shape
    x, weight, added = random(max(ROWS), inputs), random(outputs, inputs, scale=0.05), random(outputs)
    residual, norm = random(max(ROWS), outputs), Norm(random(inputs), 1e-6)
    add = added if bias else None
    normed = torch.nn.functional.rms_norm(x.float(), (inputs,), norm.weight.float(), 1e-6).to(DTYPE).float()
    product = x.float() @ weight.float().T + (added.float() if bias else 0.0)
    halves = (normed @ weight.float().T).chunk(2, -1)
    wanted = {
        "linear": normed @ weight.float().T + (added.float() if bias else 0.0),
        "gated": torch.nn.functional.silu(halves[0]) * halves[1],
        "add": residual.float() + product,
    }
    whole: dict[str, torch.Tensor] = {}
    for rows in sorted(ROWS, reverse=True):
        got = {
            "linear": OPS.norm_linear(x[:rows], norm, weight, add),
            "gated": OPS.norm_gated(x[:rows], norm, weight),
            "add": OPS.linear_add(x[:rows], weight, add, residual[:rows].clone()),
        }
        for name, y in got.items():
            assert error(y, wanted[name][:rows]) < TOLERANCE, (name, rows)
            assert same(y, whole.setdefault(name, y)[:rows]), (name, rows)


class Cache:
    """Tokens of a few rows in random pages, and steps that compute some of them."""

    def __init__(self, heads: int, kv_heads: int, dim: int, page_size: int, length: int, rows: int) -> None:
        torch.manual_seed(1)
        self.shape = AttentionShape(1, heads, kv_heads, dim, dim**-0.5, DTYPE)
        pages = rows * -(-length // page_size)
        self.page_size, self.length = page_size, length
        self.table = torch.randperm(pages).int().view(rows, -1).to(DEVICE)
        self.k = torch.zeros(pages * page_size, kv_heads, dim, dtype=DTYPE, device=DEVICE)
        self.v = torch.zeros_like(self.k)
        self.qkv = random(rows, length, (heads + 2 * kv_heads) * dim)
        angles = torch.outer(torch.arange(length).float(), 1e4 ** (-torch.arange(0, dim, 2).float() / dim))
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], -1).to(DEVICE)
        self.norms = Norm(random(dim), 1e-6), Norm(random(dim), 1e-6)
        self.attention = InvariantAttention(self.shape, KVCache([self.k], [self.v], page_size), pdl=ON_GPU)

    def step(self, parts: list[tuple[int, int, int]], *, small: bool) -> dict[tuple[int, int], torch.Tensor]:
        """parts: (row, first position, tokens) -> output by (row, position)"""
        batch = make_batch([Part(row, first, [0] * count) for row, first, count in parts])
        places = [(row, first + i) for row, first, count in parts for i in range(count)]
        rows = torch.tensor([row for row, _ in places], dtype=torch.int32, device=DEVICE)
        positions = torch.tensor([position for _, position in places], dtype=torch.int32, device=DEVICE)
        page = self.table[rows.long(), (positions // self.page_size).long()]
        inputs = CudaForwardBatch(
            batch=batch, token_ids=rows, positions=positions, slots=page * self.page_size + positions % self.page_size,
            page_table=self.table, rows=rows, token_rows=rows, starts=positions, num_new=rows, logits_index=rows,
            host_page_table=self.table.cpu().numpy(), page_size=self.page_size,
            key=GraphKey(len(places), 0, False, 1) if small else None,
        )  # fmt: skip
        self.attention.plan(inputs)
        qkv = torch.stack([self.qkv[row, position] for row, position in places])
        out = self.attention.attend(AttentionLayer(0, self.norms, self.cos_sin), qkv, inputs)
        return dict(zip(places, out, strict=True))

    def want(self, row: int, position: int) -> torch.Tensor:
        heads, kv_heads, dim = self.shape.num_heads, self.shape.num_kv_heads, self.shape.head_dim
        q, k, v = self.qkv[row, : position + 1].view(position + 1, -1, dim).split([heads, kv_heads, kv_heads], 1)
        q, k = (self._rotated(x, norm) for x, norm in zip((q, k), self.norms, strict=True))
        grouped = q[-1].view(kv_heads, -1, dim)
        weights = (torch.einsum("hgd,thd->hgt", grouped, k) * dim**-0.5).softmax(-1)
        return torch.einsum("hgt,thd->hgd", weights, v.float()).reshape(-1)

    def _rotated(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        x = torch.nn.functional.rms_norm(x.float(), x.shape[-1:], norm.weight.float(), norm.eps)
        cos, sin = self.cos_sin[: len(x), None].chunk(2, -1)
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(DTYPE).float()


LAYOUTS = [(6, 2, 64, 1), (8, 2, 128, 4), (3, 3, 64, 1), (16, 1, 64, 16)] if ON_GPU else [(3, 1, 16, 1), (4, 2, 16, 4)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_attention_is_right_and_has_the_same_bits_whole_in_chunks_and_decoded(
    layout: tuple[int, int, int, int],
) -> None:
    length = 200 if ON_GPU else 70
    cache = Cache(*layout, length=length, rows=3)
    whole = cache.step([(0, 0, length), (1, 0, length), (2, 0, 5)], small=False)
    for place in [(0, 0), (0, 17), (1, length - 1), (2, 4)]:
        assert error(whole[place], cache.want(*place)) < TOLERANCE, place
    for chunk, small in ((length // 3, False), (7, True)):
        cache.k.zero_(), cache.v.zero_()
        for first in range(0, length, chunk):
            count = min(chunk, length - first)
            for place, out in cache.step([(1, first, count)], small=small).items():
                assert same(out, whole[place]), (place, chunk)
    cache.step([(0, 0, length - 3)], small=False)
    for position in range(length - 3, length):
        decoded = cache.step([(1, position, 1), (0, position, 1)], small=True)
        assert same(decoded[0, position], whole[0, position])


def test_query_tiles_cut_each_row_by_itself() -> None:
    batch = make_batch([Part(4, 10, [1] * 5), Part(2, 0, [1]), Part(7, 3, [1] * 4)])
    tiles = query_tiles(batch, 4)
    assert tiles.dtype == np.int32
    assert tiles.T.tolist() == [[4, 10, 0, 4], [4, 14, 4, 1], [2, 0, 5, 1], [7, 3, 6, 4]]
