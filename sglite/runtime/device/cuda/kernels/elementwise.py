"""RMS norm, silu-and-multiply, and what prepares a step's inputs from the arrays that the host sent."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def norm_kernel(x_ptr, gain_ptr, y_ptr, eps, K: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr):
    """y[m] = x[m] * rsqrt(mean(x[m]^2) + eps) * gain, one program a row  # [M, K]."""
    if PDL:
        gdc_launch_dependents()
    k = tl.arange(0, BLOCK_K)
    gain = tl.load(gain_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    at = tl.program_id(0).to(tl.int64) * K + k
    if PDL:
        gdc_wait()
    x = tl.load(x_ptr + at, mask=k < K, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / K + eps) * gain
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=k < K)


@triton.jit
def silu_kernel(gate_up_ptr, y_ptr, width, BLOCK: tl.constexpr):
    """y = silu(first half) * second half of each row  # [T, 2 * width] -> [T, width]. Grid (T, width / BLOCK)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up_ptr + row * 2 * width + at, mask=at < width, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * width + width + at, mask=at < width, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(y_ptr + row * width + at, y.to(y_ptr.dtype.element_ty), mask=at < width)


@triton.jit
def prepare_kernel(
    tokens_ptr,  # int32[T]: negative becomes the row's last token
    token_rows_ptr,  # int32[T]
    last_tokens_ptr,  # int32[max_rows]
    update_ptr,  # int32[2, U]: flat index into the page table, page
    table_ptr,  # int32[max_rows * pages a row]
    counts_ptr,  # int32[2]: T, U
    update_stride,
    BLOCK: tl.constexpr,
):
    """Page updates of the step and the tokens that only the device knows. Any grid: programs take turns."""
    num_tokens = tl.load(counts_ptr)
    num_updates = tl.load(counts_ptr + 1)
    step = tl.num_programs(0) * BLOCK
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    for i in range(0, num_updates, step):
        at = i + lane
        index = tl.load(update_ptr + at, mask=at < num_updates, other=0)
        page = tl.load(update_ptr + update_stride + at, mask=at < num_updates, other=0)
        tl.store(table_ptr + index, page, mask=at < num_updates)
    for i in range(0, num_tokens, step):
        at = i + lane
        live = at < num_tokens
        token = tl.load(tokens_ptr + at, mask=live, other=0)
        unknown = live & (token < 0)
        row = tl.load(token_rows_ptr + at, mask=unknown, other=0)
        tl.store(tokens_ptr + at, tl.load(last_tokens_ptr + row, mask=unknown, other=0), mask=unknown)


@triton.jit
def gather_pages_kernel(
    table_ptr,  # int32[max_rows, pages a row]
    rows_ptr,  # int32[N]
    ends_ptr,  # int32[N + 1]: where each row's pages begin in the output
    pages_ptr,  # int32[ends[N]]
    table_stride,
    BLOCK: tl.constexpr,
):
    """The pages of the rows one after another, as FlashInfer wants them. Grid (N, any)."""
    n = tl.program_id(0)
    row = tl.load(rows_ptr + n).to(tl.int64)
    begin = tl.load(ends_ptr + n)
    count = tl.load(ends_ptr + n + 1) - begin
    for i in range(tl.program_id(1) * BLOCK, count, tl.num_programs(1) * BLOCK):
        at = i + tl.arange(0, BLOCK)
        page = tl.load(table_ptr + row * table_stride + at, mask=at < count, other=0)
        tl.store(pages_ptr + begin + at, page, mask=at < count)
