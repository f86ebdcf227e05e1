"""A linear of few rows and few inputs: a program holds its whole part of W before it waits for the kernel before.

What stands around the linear is folded in as in linear.py, but with all inputs of a row at hand NORM rounds where
`norm_kernel` does, so that both give the same but for the order of one sum. K is split over the warps as the batch of a
3D dot; it is cut into two tiles, as tiles are powers of two: 576 = 512 + 64.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize=["M"])
def panel_kernel(  # noqa: C901, PLR0912, PLR0915 - one launch cannot be split
    x_ptr,  # [M, K]
    w_ptr,  # [N or 2N, K]
    y_ptr,  # [M, N]
    norm_ptr,  # [K] with NORM
    bias_ptr,  # [N or 2N] with BIAS
    M,
    N,
    eps,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD: tl.constexpr,  # inputs of the first tile of W: a power of two
    TAIL: tl.constexpr,  # of the second, a power of two of at least 16 * PARTS, or 0
    PARTS: tl.constexpr,  # parts of K, one a warp
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (outputs / BLOCK_N, rows / BLOCK_M), both rounded up."""
    if PDL:
        gdc_launch_dependents()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    real = n < N
    w_rows = w_ptr + n[None, None, :].to(tl.int64) * K
    up_rows = w_rows + N.to(tl.int64) * K
    part = tl.arange(0, PARTS)[:, None]
    k = part * (HEAD // PARTS) + tl.arange(0, HEAD // PARTS)[None, :]  # [PARTS, HEAD / PARTS]
    w = tl.load(w_rows + k[:, :, None], mask=real[None, None, :], other=0.0)
    if GATED:
        up = tl.load(up_rows + k[:, :, None], mask=real[None, None, :], other=0.0)
    if NORM:
        gain = tl.load(norm_ptr + k)[:, None, :]
    if TAIL > 0:
        kt = HEAD + part * (TAIL // PARTS) + tl.arange(0, TAIL // PARTS)[None, :]
        live_k = kt < K
        w_tail = tl.load(w_rows + kt[:, :, None], mask=real[None, None, :] & live_k[:, :, None], other=0.0)
        if GATED:
            up_tail = tl.load(up_rows + kt[:, :, None], mask=real[None, None, :] & live_k[:, :, None], other=0.0)
        if NORM:
            gain_tail = tl.load(norm_ptr + kt, mask=live_k, other=0.0)[:, None, :]
    if BIAS:
        bias = tl.load(bias_ptr + n, mask=real, other=0.0).to(tl.float32)
        if GATED:
            bias_up = tl.load(bias_ptr + N + n, mask=real, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = m < M
    x_rows = x_ptr + m[None, :, None] * K
    y_tile = y_ptr + m[:, None] * N + n[None, :]
    kept = live[:, None] & real[None, :]
    x = tl.load(x_rows + k[:, None, :], mask=live[None, :, None], other=0.0)  # [PARTS, BLOCK_M, HEAD / PARTS]
    if TAIL > 0:
        x_tail = tl.load(x_rows + kt[:, None, :], mask=live[None, :, None] & live_k[:, None, :], other=0.0)
    if ADD:
        before = tl.load(y_tile, mask=kept, other=0.0).to(tl.float32)
    if NORM:
        wide = x.to(tl.float32)
        squares = tl.sum(wide * wide, 2)
        if TAIL > 0:
            wide_tail = x_tail.to(tl.float32)
            squares += tl.sum(wide_tail * wide_tail, 2)
        scale = tl.rsqrt(tl.sum(squares, 0) / K + eps)[None, :, None]
        x = (wide * scale * gain.to(tl.float32)).to(x.dtype)
        if TAIL > 0:
            x_tail = (wide_tail * scale * gain_tail.to(tl.float32)).to(x.dtype)
    acc = tl.dot(x, w)
    if GATED:
        acc_up = tl.dot(x, up)
    if TAIL > 0:
        acc = tl.dot(x_tail, w_tail, acc)
        if GATED:
            acc_up = tl.dot(x_tail, up_tail, acc_up)
    y = tl.sum(acc, 0)
    if BIAS:
        y += bias[None, :]
    if GATED:
        y_up = tl.sum(acc_up, 0)
        if BIAS:
            y_up += bias_up[None, :]
        y = y / (1.0 + tl.exp(-y)) * y_up
    if ADD:
        y += before
    tl.store(y_tile, y.to(y_ptr.dtype.element_ty), mask=kept)
