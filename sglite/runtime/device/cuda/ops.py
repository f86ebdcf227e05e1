"""The pieces of a decoder layer on a GPU: which kernel carries out a linear depends on how many rows x has.

    1 row          row_kernel: norm, product, silu and residual in one launch
    2 .. 32 rows   panel_kernel, the same, where there are few inputs
    2 .. 64 rows   a norm launch, then a skinny or wide kernel with the rest in its epilogue, where the shape allows
    more           a norm launch, cuBLAS (the residual as its addend), silu-and-multiply
    large steps    the same, gate, up and silu in one kernel where there is a bulk copy engine (Hopper)

The configurations are the best that `tests/bench/decode_step.py` measured on an H200.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from sglite.runtime.device.base import Norm, PackedWeight
from sglite.runtime.device.cuda.kernels.elementwise import norm_kernel, silu_kernel
from sglite.runtime.device.cuda.kernels.gated import gated_kernel
from sglite.runtime.device.cuda.kernels.linear import row_kernel, skinny_kernel, wide_kernel
from sglite.runtime.device.cuda.kernels.panel import panel_kernel

_SKINNY_ROWS = 32
_WIDE_ROWS = 64
_SMALL_WEIGHT = 16 << 20  # bytes
_MANY_OUTPUTS = 65536  # an output projection
_PANEL_INPUTS = 768
_PANEL_ADD_INPUTS = 3072
_PANEL_OUTPUTS = 2048
_PANEL_ADD_OUTPUTS = 1024  # a program of 8 a multiprocessor
_PANEL_SHARED = 160 << 10  # bytes a program has on a GPU that can hold the tiles of the most inputs
_GATED_ROWS = 1024  # four waves of tiles for the 3,072 outputs of a small model


@dataclass(frozen=True, slots=True)
class RowConfig:
    block_n: int
    block_k: int
    warps: int
    prefetch: bool = False  # ask L2 for the program's whole part of the weight ahead of the wait


def row_config(outputs: int, inputs: int, *, gated: bool) -> RowConfig:
    if gated:
        return RowConfig(2, 1024, 2)
    if outputs >= _MANY_OUTPUTS:
        return RowConfig(8, 2048, 8) if inputs >= 2048 else RowConfig(16, 1024, 8)
    return RowConfig(4, 2048, 8) if inputs >= 2048 else RowConfig(8, 1024, 4)


@dataclass(frozen=True, slots=True)
class SkinnyConfig:
    block_m: int
    block_n: int
    block_k: int
    parts: int
    stages: int


def skinny_config(rows: int, outputs: int, inputs: int) -> SkinnyConfig | None:
    """None: no configuration divides the shape."""
    block_n = 32 if rows > 16 and outputs >= 4096 else 8 if outputs <= 2048 else 16
    for block_k in (128, 64, 32, 16):
        if inputs % (4 * block_k) == 0 and outputs % block_n == 0:
            return SkinnyConfig(16 if rows <= 16 else 32, block_n, block_k, 4, 4 if block_n == 16 else 3)
    return None


@dataclass(frozen=True, slots=True)
class WideConfig:
    block_m: int
    block_n: int
    block_k: int
    stages: int


def wide_config(rows: int, outputs: int, inputs: int, *, gated: bool) -> WideConfig | None:
    """None: no configuration divides the shape."""
    block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
    for block_k in (128, 64, 32):
        stages = 3 if gated and block_m > 32 and block_k == 128 else 5 if block_m == 16 and not gated else 4
        if inputs % block_k == 0 and outputs % 64 == 0:
            return WideConfig(block_m, 64, block_k, stages)
    return None


@dataclass(frozen=True, slots=True)
class PanelConfig:
    block_n: int
    head: int  # inputs of the first tile
    tail: int  # of the second one, rounded up
    parts: int


def panel_config(rows: int, outputs: int, inputs: int, *, norm: bool) -> PanelConfig | None:
    """None: another kernel is faster. With a norm every program reads all of x for itself, more rows or inputs take
    more shared memory and registers, so that the next kernel's programs find no room to load ahead."""
    most = _PANEL_INPUTS if rows > 16 or norm else _PANEL_ADD_INPUTS
    if not 1 < rows <= _SKINNY_ROWS or not 128 <= inputs <= most:
        return None
    if outputs > (_PANEL_OUTPUTS if norm else _PANEL_ADD_OUTPUTS):
        return None
    parts = 4 if inputs < 1024 else 8
    head = 1 << (inputs.bit_length() - 1)
    tail = 0 if head == inputs else max(16 * parts, triton.next_power_of_2(inputs - head))
    return PanelConfig(8, head, tail, parts)


class TorchOps:
    """float32: plain torch, the same arithmetic as on the CPU."""

    def pack(self, weight: torch.Tensor) -> PackedWeight:
        return weight

    def pack_tied(self, weight: torch.Tensor) -> tuple[PackedWeight, torch.Tensor]:
        return weight, weight

    def norm_linear(self, x: torch.Tensor, norm: Norm, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(F.rms_norm(x, norm.weight.shape, norm.weight, norm.eps), weight, bias)

    def norm_gated(self, x: torch.Tensor, norm: Norm, weight: PackedWeight) -> torch.Tensor:
        gate, up = self.norm_linear(x, norm, weight, None).chunk(2, dim=-1)
        return F.silu(gate) * up

    def linear_add(
        self, x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, residual: torch.Tensor
    ) -> torch.Tensor:
        return residual + F.linear(x, weight, bias)


class CudaOps:
    """`pdl`: the GPU has programmatic dependent launch (Hopper and newer)."""

    def __init__(self, *, pdl: bool) -> None:
        self._pdl = pdl
        properties = torch.cuda.get_device_properties() if pdl else None
        self._multiprocessors = 0 if properties is None else properties.multi_processor_count
        self._roomy = getattr(properties, "shared_memory_per_block_optin", 0) >= _PANEL_SHARED
        self._torch = TorchOps()

    def pack(self, weight: torch.Tensor) -> PackedWeight:
        return weight

    def pack_tied(self, weight: torch.Tensor) -> tuple[PackedWeight, torch.Tensor]:
        return weight, weight

    def norm_linear(self, x: torch.Tensor, norm: Norm, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        if x.dtype == torch.float32:
            return self._torch.norm_linear(x, norm, weight, bias)
        rows, outputs = x.shape[0], weight.shape[0]
        if rows == 1:
            y = x.new_empty(1, outputs)
            self._row(x, weight, y, bias, norm=norm)
            return y
        panel = panel_config(rows, outputs, x.shape[1], norm=True)
        if panel is not None:
            y = x.new_empty(rows, outputs)
            self._panel(panel, x, weight, y, bias, norm=norm)
            return y
        normed = launch_norm(x, norm, pdl=self._pdl)
        if rows <= (_SKINNY_ROWS if outputs >= _MANY_OUTPUTS else _WIDE_ROWS):
            y = x.new_empty(rows, outputs)
            if self._wide(normed, weight, y, bias, gated=False):
                return y
        return F.linear(normed, weight, bias)

    def norm_gated(self, x: torch.Tensor, norm: Norm, weight: PackedWeight) -> torch.Tensor:
        if x.dtype == torch.float32:
            return self._torch.norm_gated(x, norm, weight)
        rows, outputs = x.shape[0], weight.shape[0] // 2
        y = x.new_empty(rows, outputs)
        if rows == 1:
            self._row(x, weight, y, None, norm=norm, gated=True)
            return y
        panel = panel_config(rows, outputs, x.shape[1], norm=True)
        if panel is not None:
            self._panel(panel, x, weight, y, None, norm=norm, gated=True)
            return y
        normed = launch_norm(x, norm, pdl=self._pdl)
        if rows <= _WIDE_ROWS and self._wide(normed, weight, y, None, gated=True):
            return y
        if self._pdl and rows >= _GATED_ROWS and not (outputs % 8 or x.shape[1] % 8):
            launch_gated(normed, weight, y, programs=self._multiprocessors)
            return y
        gate_up = F.linear(normed, weight)
        if rows:
            silu_kernel[(rows, triton.cdiv(outputs, 2048))](gate_up, y, outputs, BLOCK=2048)
        return y

    def linear_add(
        self, x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, residual: torch.Tensor
    ) -> torch.Tensor:
        if x.dtype == torch.float32:
            return self._torch.linear_add(x, weight, bias, residual)
        rows = x.shape[0]
        if rows == 1:
            self._row(x, weight, residual, bias, add=True)
            return residual
        panel = panel_config(rows, residual.shape[1], x.shape[1], norm=False)
        if panel is not None and (self._roomy or x.shape[1] <= _PANEL_INPUTS):
            self._panel(panel, x, weight, residual, bias, add=True)
            return residual
        if rows <= _SKINNY_ROWS and self._skinny(x, weight, residual, bias):
            return residual
        residual.addmm_(x, weight.t())
        return residual if bias is None else residual.add_(bias)

    def _row(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        y: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        norm: Norm | None = None,
        gated: bool = False,
        add: bool = False,
    ) -> None:
        outputs, inputs = y.shape[1], x.shape[1]
        config = row_config(outputs, inputs, gated=gated)
        part = config.block_n * inputs * 2
        ahead = config.prefetch and self._pdl and part % 128 == 0 and outputs % config.block_n == 0
        row_kernel[(triton.cdiv(outputs, config.block_n),)](
            x, weight, y, x if norm is None else norm.weight, x if bias is None else bias, outputs,
            0.0 if norm is None else norm.eps,
            K=inputs, BLOCK_N=config.block_n, BLOCK_K=config.block_k, NORM=norm is not None, GATED=gated, ADD=add,
            BIAS=bias is not None, PREFETCH=part if ahead else 0, LANES=32 * config.warps, PDL=self._pdl,
            num_warps=config.warps, num_stages=1, launch_pdl=self._pdl,
        )  # fmt: skip

    def _panel(
        self,
        config: PanelConfig,
        x: torch.Tensor,
        weight: torch.Tensor,
        y: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        norm: Norm | None = None,
        gated: bool = False,
        add: bool = False,
    ) -> None:
        (rows, inputs), outputs = x.shape, y.shape[1]
        panel_kernel[(triton.cdiv(outputs, config.block_n), triton.cdiv(rows, 16))](
            x, weight, y, x if norm is None else norm.weight, x if bias is None else bias, rows, outputs,
            0.0 if norm is None else norm.eps,
            K=inputs, BLOCK_M=16, BLOCK_N=config.block_n, HEAD=config.head, TAIL=config.tail, PARTS=config.parts,
            NORM=norm is not None, GATED=gated, ADD=add, BIAS=bias is not None, PDL=self._pdl, num_warps=config.parts,
            launch_pdl=self._pdl,
        )  # fmt: skip

    def _prefetch(self, block_n: int, weight: torch.Tensor) -> int:
        """Bytes of each program's part of the weight to ask for ahead. It pays where the whole weight is small."""
        part = block_n * weight.shape[1] * weight.itemsize
        return min(part, 16384) if self._pdl and weight.nbytes <= _SMALL_WEIGHT else 0

    def _skinny(self, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor | None) -> bool:
        """residual += x @ weight.T + bias, if the shape allows."""
        rows, inputs = x.shape
        outputs = residual.shape[1]
        config = skinny_config(rows, outputs, inputs)
        if config is None:
            return False
        skinny_kernel[(outputs // config.block_n,)](
            x, weight, residual, x, x if bias is None else bias, rows, outputs, 0.0,
            K=inputs, BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, PARTS=config.parts,
            STAGES=config.stages, PREFETCH=self._prefetch(config.block_n, weight), NORM=False, GATED=False, ADD=True,
            BIAS=bias is not None, PDL=self._pdl, num_warps=config.parts, launch_pdl=self._pdl,
        )  # fmt: skip
        return True

    def _wide(
        self, x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, bias: torch.Tensor | None, *, gated: bool
    ) -> bool:
        """y = x @ weight.T + bias, or its gated form, if the shape allows."""
        rows, inputs = x.shape
        outputs = y.shape[1]
        config = wide_config(rows, outputs, inputs, gated=gated)
        if config is None:
            return False
        wide_kernel[(triton.cdiv(rows, config.block_m), outputs // 64)](
            x, weight, y, x if bias is None else bias, rows, outputs,
            K=inputs, BLOCK_M=config.block_m, BLOCK_N=64, BLOCK_K=config.block_k, STAGES=config.stages,
            PREFETCH=self._prefetch(64, weight), GATED=gated, ADD=False, BIAS=bias is not None, PDL=self._pdl,
            num_warps=4, launch_pdl=self._pdl,
        )  # fmt: skip
        return True


def launch_norm(x: torch.Tensor, norm: Norm, *, pdl: bool) -> torch.Tensor:
    """A program a row: what a row gives depends on no other."""
    y = torch.empty_like(x)
    rows, width = x.shape
    if rows:
        block = triton.next_power_of_2(width)
        norm_kernel[(rows,)](
            x, norm.weight, y, norm.eps, K=width, BLOCK_K=block, PDL=pdl, num_warps=8 if block >= 4096 else 4,
            launch_pdl=pdl,
        )  # fmt: skip
    return y


def launch_gated(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, *, programs: int) -> None:
    """y = silu(x @ gate.T) * (x @ up.T); weight: gate above up. Rows of all three begin at multiples of 16 bytes."""
    rows, inputs = x.shape
    gated_kernel[(programs,)](
        TensorDescriptor.from_tensor(x, [128, 64]),
        TensorDescriptor.from_tensor(weight, [128, 64]),
        TensorDescriptor.from_tensor(y, [128, 128]),
        rows, y.shape[1], inputs,
        BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, GROUP_M=16, PROGRAMS=programs, STAGES=3,
        DTYPE=tl.bfloat16 if y.dtype == torch.bfloat16 else tl.float16, num_warps=8,
    )  # fmt: skip
