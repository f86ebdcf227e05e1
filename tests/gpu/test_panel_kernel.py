"""The kernel of few rows and few inputs: outputs that fill no program, inputs of one and of two tiles, both types."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from sglite.runtime.device.base import Norm
from sglite.runtime.device.cuda.ops import CudaOps, panel_config
from tests.gpu.kernels import DEVICE, ON_GPU, TOLERANCE, error

DTYPES = [torch.bfloat16, torch.float16] if ON_GPU else [torch.float16]  # the interpreter's tl.dot knows no bfloat16
ROWS = (2, 16, 31) if ON_GPU else (2, 17)
INPUTS = (200, 576) if ON_GPU else (128, 200)
ADD_INPUTS = (200, 1536, 2048, 3072) if ON_GPU else (200,)


@pytest.fixture
def ops() -> CudaOps:
    torch.manual_seed(0)
    return CudaOps(pdl=ON_GPU)


def random(dtype: torch.dtype, *shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape) * scale).to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("inputs", INPUTS)
def test_norm_product_and_silu_are_those_of_plain_torch(
    ops: CudaOps, rows: int, inputs: int, dtype: torch.dtype
) -> None:
    outputs = 70
    assert panel_config(rows, outputs, inputs, norm=True) is not None
    x, weight, bias = (
        random(dtype, rows, inputs), random(dtype, 2 * outputs, inputs, scale=0.05), random(dtype, 2 * outputs)
    )  # fmt: skip
    norm = Norm((torch.rand(inputs) + 0.5).to(dtype).to(DEVICE), 1e-6)
    normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + norm.eps) * norm.weight.float()
    product = normed @ weight.float().T
    assert error(ops.norm_linear(x, norm, weight, bias), product + bias.float()) < TOLERANCE
    assert error(ops.norm_linear(x, norm, weight, None), product) < TOLERANCE
    gate, up = product.chunk(2, -1)
    assert error(ops.norm_gated(x, norm, weight), F.silu(gate) * up) < TOLERANCE


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("inputs", ADD_INPUTS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_what_is_added_to_the_residual_stream_is_too(
    ops: CudaOps, rows: int, inputs: int, with_bias: bool, dtype: torch.dtype
) -> None:
    outputs = 70
    x, weight, residual = (
        random(dtype, rows, inputs), random(dtype, outputs, inputs, scale=0.05), random(dtype, rows, outputs)
    )  # fmt: skip
    bias = random(dtype, outputs) if with_bias else None
    want = residual.float() + x.float() @ weight.float().T + (0 if bias is None else bias.float())
    assert error(ops.linear_add(x, weight, bias, residual), want) < TOLERANCE
