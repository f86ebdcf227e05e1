from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from sglite.runtime.device.base import Norm
from sglite.runtime.device.cuda.ops import CudaOps, launch_gated
from tests.gpu.kernels import DEVICE, DTYPE, ON_GPU, TOLERANCE, error, random

ROWS = (1, 3, 16, 17, 33, 70) if ON_GPU else (1, 3, 17)
SHAPES = ((64, 128), (192, 576), (64, 4096), (6144, 4096)) if ON_GPU else ((64, 128), (64, 192))


@pytest.fixture
def ops() -> CudaOps:
    torch.manual_seed(0)
    return CudaOps(pdl=ON_GPU)


def normed(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps) * norm.weight.float()


def make_norm(width: int) -> Norm:
    return Norm((torch.rand(width) + 0.5).to(DTYPE).to(DEVICE), 1e-6)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_norm_linear_is_the_product_of_the_normalised_rows(
    ops: CudaOps, rows: int, outputs: int, inputs: int, with_bias: bool
) -> None:
    x, weight, norm = random(rows, inputs), random(outputs, inputs, scale=0.05), make_norm(inputs)
    bias = random(outputs) if with_bias else None
    got = ops.norm_linear(x, norm, ops.pack(weight), bias)
    want = normed(x, norm) @ weight.float().T + (0 if bias is None else bias.float())
    assert error(got, want) < TOLERANCE


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("width", "inputs"), SHAPES)
def test_norm_gated_multiplies_up_with_silu_of_gate(ops: CudaOps, rows: int, width: int, inputs: int) -> None:
    x, weight, norm = random(rows, inputs), random(2 * width, inputs, scale=0.05), make_norm(inputs)
    gate, up = (normed(x, norm) @ weight.float().T).chunk(2, -1)
    assert error(ops.norm_gated(x, norm, ops.pack(weight)), F.silu(gate) * up) < TOLERANCE


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_add_adds_to_the_residual_stream(
    ops: CudaOps, rows: int, outputs: int, inputs: int, with_bias: bool
) -> None:
    x, weight, residual = random(rows, inputs), random(outputs, inputs, scale=0.05), random(rows, outputs)
    bias = random(outputs) if with_bias else None
    want = residual.float() + x.float() @ weight.float().T + (0 if bias is None else bias.float())
    assert error(ops.linear_add(x, ops.pack(weight), bias, residual), want) < TOLERANCE


def test_no_rows_give_no_rows(ops: CudaOps) -> None:
    x, norm = random(0, 128), make_norm(128)
    assert ops.norm_linear(x, norm, random(64, 128), None).shape == (0, 64)
    assert ops.norm_gated(x, norm, random(64, 128)).shape == (0, 32)


@pytest.mark.parametrize(
    ("rows", "width", "inputs"),
    [(1024, 3072, 1024), (1500, 1536, 576), (2100, 200, 128)] if ON_GPU else [(150, 200, 96), (128, 136, 64)],
)
def test_gate_up_and_silu_of_many_rows_are_one_kernel(ops: CudaOps, rows: int, width: int, inputs: int) -> None:
    x, weight = random(rows, inputs), random(2 * width, inputs, scale=0.05)
    y = torch.full((rows, width), float("nan"), dtype=DTYPE, device=DEVICE)
    launch_gated(x, weight, y, programs=132 if ON_GPU else 3)
    gate, up = (x.float() @ weight.float().T).chunk(2, -1)
    assert error(y, F.silu(gate) * up) < TOLERANCE
