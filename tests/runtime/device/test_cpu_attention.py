"""The CPU's attention against the plain reference, over ragged, shared and paged shapes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sglite.runtime.device.base import AttentionLayer, AttentionShape, KVCache, Norm, RowTables
from sglite.runtime.device.cpu import CpuDevice
from sglite.runtime.device.cpu_attention import cut_by_length
from sglite.runtime.device.torch_attention import TorchAttention
from tests.fakes.batches import Part, make_batch

SHAPE = AttentionShape(num_layers=1, num_heads=6, num_kv_heads=2, head_dim=16, scale=0.25, dtype=torch.float32)
PAGES = 2048
Rows = list[tuple[int, int]]  # (start, new tokens) of each row


def pages_of(rows: Rows, page_size: int, *, shuffled: bool, shared: int = 0, seed: int = 0) -> np.ndarray:
    """A page table in which all rows begin with the same `shared` pages."""
    order = np.random.default_rng(seed).permutation(PAGES) if shuffled else np.arange(PAGES)
    width = max(start + new for start, new in rows) // page_size + 1
    table = np.zeros((len(rows), width), np.int32)
    used = shared
    for i, (start, new) in enumerate(rows):
        table[i, :shared] = order[:shared]
        own = -(-(start + new) // page_size) - shared
        table[i, shared : shared + own] = order[used : used + own]
        used += own
    return table


def both(rows: Rows, table: np.ndarray, page_size: int, *, norms: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """(output of the CPU's attention, of the reference) for random queries, keys, values and cached KV. The compiled
    one is compared on the way."""
    device = CpuDevice(num_threads=1, compiled=False)
    compiled = CpuDevice(num_threads=1)
    tables = RowTables(table, torch.from_numpy(table), torch.zeros(len(rows), dtype=torch.int32), page_size)
    batch = make_batch([Part(i, start, [0] * new) for i, (start, new) in enumerate(rows)])
    inputs = device.prepare(batch, tables)
    torch.manual_seed(0)
    cache = device.make_kv_cache(SHAPE, num_pages=PAGES, page_size=page_size)
    cache.k[0].normal_()
    cache.v[0].normal_()
    plain = KVCache([cache.k[0].clone()], [cache.v[0].clone()], page_size)
    copied = compiled.make_kv_cache(SHAPE, num_pages=PAGES, page_size=page_size)
    copied.k[0].copy_(cache.k[0])
    copied.v[0].copy_(cache.v[0])
    qkv = torch.randn(batch.num_tokens, (SHAPE.num_heads + 2 * SHAPE.num_kv_heads) * SHAPE.head_dim)
    angles = torch.rand(4096, SHAPE.head_dim // 2)
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    head_norms = (Norm(torch.rand(16), 1e-5), Norm(torch.rand(16), 1e-5)) if norms else None
    outs = []
    for attention in (
        TorchAttention(SHAPE, plain),
        device.make_attention(SHAPE, cache),
        compiled.make_attention(SHAPE, copied),
    ):
        attention.plan(inputs)
        outs.append(attention.attend(AttentionLayer(0, head_norms, cos_sin), qkv.clone(), inputs))
    for written in (cache, copied):
        torch.testing.assert_close(written.k[0], plain.k[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(written.v[0], plain.v[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(outs[2], outs[0], atol=3e-6, rtol=1e-5)
    return outs[1], outs[0]


CASES: dict[str, Rows] = {
    "one row decodes": [(70, 1)],
    "first token": [(0, 1)],
    "ragged decode": [(5, 1), (300, 1), (40, 1), (41, 1), (0, 1), (900, 1)],
    "prefill": [(0, 100)],
    "prefill behind cached tokens": [(64, 80)],
    "forced text": [(50, 5), (10, 1), (90, 16)],
    "all kinds": [(50, 5), (0, 40), (10, 1), (64, 33), (90, 16), (128, 1)],
}


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("rows", CASES.values(), ids=CASES)
def test_equals_the_reference(rows: Rows, page_size: int, shuffled: bool) -> None:
    out, expected = both(rows, pages_of(rows, page_size, shuffled=shuffled), page_size)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize(("page_size", "shared"), [(1, 60), (16, 4)])
def test_rows_that_share_a_prefix(page_size: int, shared: int, shuffled: bool) -> None:
    rows = [(64, 1), (65, 3), (100, 1), (70, 40), (200, 1)]
    out, expected = both(rows, pages_of(rows, page_size, shuffled=shuffled, shared=shared), page_size)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)


def test_two_families_and_a_row_alone() -> None:
    rows = [(64, 1), (80, 1), (64, 1), (90, 2), (50, 1)]
    table = pages_of(rows, 1, shuffled=True)
    table[2, :60] = table[0, :60]
    table[3, :50] = table[1, :50]
    out, expected = both(rows, table, 1)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)


def test_a_row_attends_to_pages_that_a_sibling_fills_in_the_same_step() -> None:
    rows = [(0, 60), (60, 4), (60, 20)]
    table = pages_of(rows, 1, shuffled=True)
    table[1:, :60] = table[0, :60]
    out, expected = both(rows, table, 1)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)


def test_head_norms() -> None:
    rows = [(50, 3), (0, 30), (10, 1)]
    out, expected = both(rows, pages_of(rows, 1, shuffled=True), 1, norms=True)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("seed", range(20))
def test_random_batches(seed: int) -> None:
    rng = np.random.default_rng(seed)
    page_size, shared = [(1, 40), (16, 3), (4, 0)][seed % 3]
    least = shared * page_size
    rows = [
        (least + int(rng.integers(0, 200)), int(rng.choice([1, 1, 1, 2, 7, 16, 17, 50])))
        for _ in range(rng.integers(1, 12))
    ]
    table = pages_of(rows, page_size, shuffled=bool(rng.integers(2)), shared=shared, seed=seed)
    out, expected = both(rows, table, page_size)
    torch.testing.assert_close(out, expected, atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("head_dim", [4, 6, 12, 64, 80])
def test_compiled_attention_knows_every_head_size(head_dim: int) -> None:
    shape = AttentionShape(
        num_layers=1, num_heads=3, num_kv_heads=1, head_dim=head_dim, scale=head_dim**-0.5, dtype=torch.float32
    )
    device = CpuDevice(num_threads=2)
    caches = [device.make_kv_cache(shape, num_pages=64, page_size=1) for _ in range(2)]
    table = np.arange(64, dtype=np.int32).reshape(2, 32)
    tables = RowTables(table, torch.from_numpy(table), torch.zeros(2, dtype=torch.int32), 1)
    torch.manual_seed(0)
    cos_sin = torch.rand(64, head_dim)
    backends = TorchAttention(shape, caches[0]), device.make_attention(shape, caches[1])
    for parts in ([Part(0, 0, [0] * 9), Part(1, 0, [0] * 6)], [Part(0, 9, [0]), Part(1, 6, [0] * 3)]):
        batch = make_batch(parts)
        inputs = device.prepare(batch, tables)
        qkv = torch.randn(batch.num_tokens, 5 * head_dim)
        outs = []
        for backend in backends:
            backend.plan(inputs)
            outs.append(backend.attend(AttentionLayer(0, None, cos_sin), qkv.clone(), inputs))
        torch.testing.assert_close(outs[1], outs[0], atol=2e-6, rtol=1e-5)


def test_compiled_attention_is_the_same_to_the_last_bit_in_one_step_and_in_chunks() -> None:
    device = CpuDevice(num_threads=2)
    table = np.arange(128, dtype=np.int32).reshape(2, 64)
    tables = RowTables(table, torch.from_numpy(table), torch.zeros(2, dtype=torch.int32), 1)
    torch.manual_seed(0)
    width = (SHAPE.num_heads + 2 * SHAPE.num_kv_heads) * SHAPE.head_dim
    qkv, other, cos_sin = torch.randn(50, width), torch.randn(7, width), torch.rand(64, SHAPE.head_dim)

    def run(cuts: list[int], mate: bool) -> torch.Tensor:
        attention = device.make_attention(SHAPE, device.make_kv_cache(SHAPE, num_pages=128, page_size=1))
        outs = []
        for start, end in zip([0, *cuts], [*cuts, 50], strict=True):
            parts = [Part(0, start, [0] * (end - start))] + ([Part(1, 0, [0] * 7)] if mate else [])
            inputs = device.prepare(make_batch(parts), tables)
            attention.plan(inputs)
            tokens = torch.cat((qkv[start:end], other)) if mate else qkv[start:end].clone()
            outs.append(attention.attend(AttentionLayer(0, None, cos_sin), tokens, inputs)[: end - start])
        return torch.cat(outs)

    whole = run([], mate=False)
    assert torch.equal(run([13, 14, 40], mate=False), whole)
    assert torch.equal(run([1, 30], mate=True), whole)


def test_parts_have_little_padding_and_a_bounded_size() -> None:
    lengths = np.sort(np.random.default_rng(0).integers(1, 2000, 100))
    spans = cut_by_length(lengths, 4000)
    assert [i for s in spans for i in range(s.start, s.stop)] == list(range(100))
    for span in spans:
        part = lengths[span]
        assert len(part) == 1 or int(part[-1]) * len(part) <= 4000


def test_a_page_table_may_have_room_for_millions_of_tokens() -> None:
    """As where a model's config.json promises four million; what a row really has is bounded by its pages."""
    device = CpuDevice(num_threads=1)
    table = np.zeros((1, 4 << 20), np.int32)
    tables = RowTables(table, torch.from_numpy(table), torch.zeros(1, dtype=torch.int32), 1)
    inputs = device.prepare(make_batch([Part(0, 0, [0])]), tables)
    attention = device.make_attention(SHAPE, device.make_kv_cache(SHAPE, num_pages=4, page_size=1))
    attention.plan(inputs)
    qkv = torch.ones(1, (SHAPE.num_heads + 2 * SHAPE.num_kv_heads) * SHAPE.head_dim)
    out = attention.attend(AttentionLayer(0, None, torch.rand(8, SHAPE.head_dim)), qkv, inputs)
    assert torch.equal(out, torch.ones_like(out))
