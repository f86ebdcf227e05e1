"""The compiled kernels against torch, and the threads that share their work."""

from __future__ import annotations

import gc
import sys
import threading
import time

import pytest
import torch

from sglite.runtime.device.base import LayerOps, Norm
from sglite.runtime.device.cpu import CpuDevice, CpuOps
from sglite.runtime.device.cpu_compiled import CompiledOps, Helpers, PanelWeight

SHAPES = [(960, 576), (48, 1536), (37, 20), (16, 4), (5, 7)]  # [out, in]


@pytest.fixture(scope="module", params=[0, 1, 3], ids=["alone", "one helper", "three helpers"])
def ops(request: pytest.FixtureRequest) -> LayerOps:
    return CompiledOps(Helpers(request.param), CpuOps(copy_bytes=0))


def inputs(rows: int, shape: tuple[int, int]) -> tuple[torch.Tensor, Norm, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, norm, weight, bias, residual."""
    torch.manual_seed(rows)
    outputs, width = shape
    norm = Norm(torch.rand(width) + 0.5, 1e-5)
    return torch.randn(rows, width), norm, torch.randn(shape), torch.randn(outputs), torch.randn(rows, outputs)


def normalised(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, norm.weight.shape, norm.weight, norm.eps)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 16, 40])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_equal_torch(ops: LayerOps, shape: tuple[int, int], rows: int) -> None:
    x, norm, weight, bias, residual = inputs(rows, shape)
    packed = ops.pack(weight)
    near = {"atol": 2e-4, "rtol": 1e-4}
    expected = normalised(x, norm) @ weight.T
    torch.testing.assert_close(ops.norm_linear(x, norm, packed, None), expected, **near)
    torch.testing.assert_close(ops.norm_linear(x, norm, packed, bias), expected + bias, **near)
    plain = x @ weight.T + residual
    torch.testing.assert_close(ops.linear_add(x, packed, None, residual.clone()), plain, **near)
    torch.testing.assert_close(ops.linear_add(x, packed, bias, residual.clone()), plain + bias, **near)


@pytest.mark.parametrize("rows", [1, 5, 16])
@pytest.mark.parametrize("half", [16, 48, 20, 7])
def test_the_gated_product_equals_torch(ops: LayerOps, half: int, rows: int) -> None:
    x, norm, weight, _, _ = inputs(rows, (2 * half, 24))
    gate, up = (normalised(x, norm) @ weight.T).chunk(2, dim=-1)
    out = ops.norm_gated(x, norm, ops.pack(weight))
    torch.testing.assert_close(out, torch.nn.functional.silu(gate) * up, atol=2e-4, rtol=1e-4)


def test_extreme_gates_are_finite(ops: LayerOps) -> None:
    norm = Norm(torch.ones(2), 0.0)
    weight = torch.zeros(32, 2)
    weight[:16, 0] = torch.linspace(-200, 200, 16)
    weight[16:, 1] = 1.0
    x = torch.ones(1, 2)
    out = ops.norm_gated(x, norm, ops.pack(weight))
    expected = torch.nn.functional.silu(weight[:16, 0])
    torch.testing.assert_close(out[0], expected, atol=1e-6, rtol=1e-5)


def test_what_is_not_a_number_stays_so(ops: LayerOps) -> None:
    x, norm, weight, _, residual = inputs(2, (32, 24))
    x[1, 3] = torch.nan
    packed = ops.pack(weight)
    for out in (
        ops.norm_linear(x, norm, packed, None),
        ops.norm_gated(x, norm, packed),
        ops.linear_add(x, packed, None, residual),
    ):
        assert out[1].isnan().all()
        assert not out[0].isnan().any()


def test_a_row_does_not_depend_on_its_batch_mates(ops: LayerOps) -> None:
    x, norm, weight, bias, _ = inputs(19, (960, 576))
    packed = ops.pack(weight)
    together = ops.norm_linear(x, norm, packed, bias)
    gated = ops.norm_gated(x, norm, packed)
    for row in range(19):
        assert torch.equal(ops.norm_linear(x[row : row + 1], norm, packed, bias)[0], together[row])
        assert torch.equal(ops.norm_gated(x[row : row + 1], norm, packed)[0], gated[row])


def test_a_tied_weight_is_still_there_for_look_ups(ops: LayerOps) -> None:
    weight = torch.randn(40, 24)
    packed, rows = ops.pack_tied(weight)
    assert isinstance(packed, PanelWeight)
    assert torch.equal(rows, weight)


def test_other_types_go_through_torch(ops: LayerOps) -> None:
    weight = torch.randn(40, 24, dtype=torch.bfloat16)
    packed = ops.pack(weight)
    x, norm = torch.randn(2, 24, dtype=torch.bfloat16), Norm(torch.ones(24, dtype=torch.bfloat16), 1e-5)
    assert ops.norm_linear(x, norm, packed, None).dtype == torch.bfloat16


def test_helpers_sleep_and_are_woken() -> None:
    helpers = Helpers(1)
    ops = CompiledOps(helpers, CpuOps(copy_bytes=0))
    x, norm, weight, _, _ = inputs(4, (960, 576))
    packed = ops.pack(weight)
    expected = ops.norm_linear(x, norm, packed, None)
    for _ in range(5):
        time.sleep(0.02)  # far longer than a helper looks for work
        for _ in range(20):
            assert torch.equal(ops.norm_linear(x, norm, packed, None), expected)


def test_helpers_end_with_their_owner() -> None:
    def names() -> int:
        return sum(thread.name.startswith("sglite-cpu") for thread in threading.enumerate())

    gc.collect()
    before = names()
    helpers = Helpers(2)
    helpers.wake()
    assert names() == before + 2
    del helpers
    gc.collect()
    until = time.monotonic() + 5
    while names() > before and time.monotonic() < until:
        time.sleep(0.01)
    assert names() == before


def test_without_numba_torch_does_the_work(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "sglite.runtime.device.cpu_compiled", None)
    device = CpuDevice(num_threads=1)
    assert isinstance(device.ops, CpuOps)
    assert "numba" in caplog.text
