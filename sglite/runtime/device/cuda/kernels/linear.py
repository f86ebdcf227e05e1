"""Skinny linear kernels: y = x @ W.T for a few rows of x, where the time is that of reading W once.

Both kernels fold in what stands around a linear of a decoder layer:

    NORM   x is normalised first: y = rsqrt(mean(x^2) + eps) * ((x * norm_weight) @ W.T). The sum of squares is
           gathered from the very tiles of x that the product reads, so that no pass over x comes first.
    GATED  W holds gate rows 0..N and up rows N..2N: y = silu(gate) * up.
    ADD    y is the residual stream: y += x @ W.T, rounded once.
    BIAS   y += bias, before anything else.

`row_kernel` (1 row) multiplies and adds in registers; `skinny_kernel` (2 to 32 rows) uses the tensor cores with x as
the 16-row operand and splits K over the warps of a program as the batch dimension of a 3D dot, so each warp streams its
own part of W and 8 or 16 rows of W make a program: enough programs to load every multiprocessor even for N = 1024.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

PREFETCH_128 = tl.constexpr("cp.async.bulk.prefetch.L2.global [$1], 128; mov.b32 $0, 0;")
PREFETCH_256 = tl.constexpr("cp.async.bulk.prefetch.L2.global [$1], 256; mov.b32 $0, 0;")


@triton.jit
def prefetch(base, NUM_BYTES: tl.constexpr, LANES: tl.constexpr):
    """Ask L2 for NUM_BYTES (a multiple of 128) from base on, 128 bytes a lane and turn."""
    for first in tl.static_range(0, NUM_BYTES, LANES * 128):
        offset = tl.minimum(first + tl.arange(0, LANES) * 128, NUM_BYTES - 128)
        tl.inline_asm_elementwise(
            PREFETCH_128, "=r,l", [base.to(tl.int64) + offset], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def row_kernel(  # noqa: C901 - one launch cannot be split
    x_ptr,  # [K]
    w_ptr,  # [N or 2N, K]
    y_ptr,  # [N]
    norm_ptr,  # [K] with NORM
    bias_ptr,  # [N or 2N] with BIAS
    N,
    eps,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    PREFETCH: tl.constexpr,  # bytes of each program's part of W that L2 is asked for before the wait
    LANES: tl.constexpr,  # threads of a program
    PDL: tl.constexpr,
):
    """One row of x. The first tile of W is on its way before the kernel waits for the one before it."""
    if PDL:
        gdc_launch_dependents()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    live = (n < N)[:, None]
    w_rows = w_ptr + n[:, None].to(tl.int64) * K
    up_rows = w_rows + N.to(tl.int64) * K
    in_k = (k < K)[None, :]
    w = tl.load(w_rows + k[None, :], mask=live & in_k, other=0.0)
    up = w
    if GATED:
        up = tl.load(up_rows + k[None, :], mask=live & in_k, other=0.0)
    gain = tl.zeros([BLOCK_K], tl.float32)
    if NORM:
        gain = tl.load(norm_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    if PDL:
        if PREFETCH > 0:
            first = w_ptr + tl.program_id(0).to(tl.int64) * (BLOCK_N * K)
            prefetch(first, PREFETCH, LANES)
            if GATED:
                prefetch(first + N.to(tl.int64) * K, PREFETCH, LANES)
        gdc_wait()
    x = tl.load(x_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    squares = x * x
    if NORM:
        x = x * gain
    acc = w.to(tl.float32) * x[None, :]
    acc_up = acc
    if GATED:
        acc_up = up.to(tl.float32) * x[None, :]
    for k0 in tl.static_range(BLOCK_K, K, BLOCK_K):
        kk = k0 + k
        w = tl.load(w_rows + kk[None, :], mask=live & (kk < K)[None, :], other=0.0)
        x = tl.load(x_ptr + kk, mask=kk < K, other=0.0).to(tl.float32)
        squares += x * x
        if NORM:
            x = x * tl.load(norm_ptr + kk, mask=kk < K, other=0.0).to(tl.float32)
        acc += w.to(tl.float32) * x[None, :]
        if GATED:
            up = tl.load(up_rows + kk[None, :], mask=live & (kk < K)[None, :], other=0.0)
            acc_up += up.to(tl.float32) * x[None, :]
    y = tl.sum(acc, 1)
    scale = 1.0
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, 0) / K + eps)
        y = y * scale
    if BIAS:
        y += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    if GATED:
        y_up = tl.sum(acc_up, 1) * scale
        if BIAS:
            y_up += tl.load(bias_ptr + N + n, mask=n < N, other=0.0).to(tl.float32)
        y = y / (1.0 + tl.exp(-y)) * y_up
    if ADD:
        y += tl.load(y_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(y_ptr + n, y.to(y_ptr.dtype.element_ty), mask=n < N)


@triton.jit
def skinny_kernel(
    x_ptr,  # [M, K]
    w_ptr,  # [N or 2N, K]
    y_ptr,  # [M, N]
    norm_ptr,  # [K] with NORM
    bias_ptr,  # [N or 2N] with BIAS
    M,
    N,
    eps,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,  # 16 or 32
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,  # parts of K, one a warp
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,  # bytes of each program's part of W that are asked for before the wait
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """2 to 32 rows of x. K is a multiple of PARTS * BLOCK_K and N of BLOCK_N."""
    if PDL:
        gdc_launch_dependents()
    first_n = tl.program_id(0) * BLOCK_N
    w_base = w_ptr + first_n.to(tl.int64) * K
    up_base = w_base + N.to(tl.int64) * K
    if PDL:
        if PREFETCH > 0:
            prefetch(w_base, PREFETCH, 32 * PARTS)
            if GATED:
                prefetch(up_base, PREFETCH, 32 * PARTS)
        gdc_wait()
    part = tl.arange(0, PARTS)[:, None, None] * BLOCK_K
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_tile = x_ptr + m[None, :, None] * K + part + k[None, None, :]  # [PARTS, BLOCK_M, BLOCK_K]
    w_offset = n[None, None, :] * K + part + k[None, :, None]  # [PARTS, BLOCK_K, BLOCK_N]
    gain_tile = norm_ptr + part + k[None, None, :]
    live = (m < M)[None, :, None]
    acc = tl.zeros([PARTS, BLOCK_M, BLOCK_N], tl.float32)
    acc_up = tl.zeros([PARTS, BLOCK_M, BLOCK_N], tl.float32)
    squares = tl.zeros([PARTS, BLOCK_M], tl.float32)
    for k0 in tl.range(0, K, PARTS * BLOCK_K, num_stages=STAGES):
        w = tl.load(w_base + w_offset + k0)
        x = tl.load(x_tile + k0, mask=live, other=0.0)
        if NORM:
            wide = x.to(tl.float32)
            squares += tl.sum(wide * wide, 2)
            x = (wide * tl.load(gain_tile + k0).to(tl.float32)).to(x.dtype)
        acc = tl.dot(x, w, acc)
        if GATED:
            up = tl.load(up_base + w_offset + k0)
            acc_up = tl.dot(x, up, acc_up)
    n = first_n + n
    y = tl.sum(acc, 0)  # [BLOCK_M, BLOCK_N]
    scale = tl.zeros([BLOCK_M, 1], tl.float32) + 1.0
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, 0) / K + eps)[:, None]
        y = y * scale
    if BIAS:
        y += tl.load(bias_ptr + n).to(tl.float32)[None, :]
    if GATED:
        y_up = tl.sum(acc_up, 0) * scale
        if BIAS:
            y_up += tl.load(bias_ptr + N + n).to(tl.float32)[None, :]
        y = y / (1.0 + tl.exp(-y)) * y_up
    y_tile = y_ptr + m[:, None] * N + n[None, :]
    if ADD:
        y += tl.load(y_tile, mask=(m < M)[:, None], other=0.0).to(tl.float32)
    tl.store(y_tile, y.to(y_ptr.dtype.element_ty), mask=(m < M)[:, None])


@triton.jit
def wide_kernel(
    x_ptr,  # [M, K]
    w_ptr,  # [N or 2N, K]
    y_ptr,  # [M, N]
    bias_ptr,  # [N or 2N] with BIAS
    M,
    N,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # 64 or 128: rows of W are the tensor cores' long side
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """32 rows of x and more: a program owns BLOCK_N outputs of BLOCK_M rows, W is the first operand."""
    if PDL:
        gdc_launch_dependents()
    first_n = tl.program_id(1) * BLOCK_N
    w_base = w_ptr + first_n.to(tl.int64) * K
    up_base = w_base + N.to(tl.int64) * K
    if PDL:
        if PREFETCH > 0:
            prefetch(w_base, PREFETCH, 128)
            if GATED:
                prefetch(up_base, PREFETCH, 128)
        gdc_wait()
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_tile = x_ptr + m[None, :] * K + k[:, None]  # [BLOCK_K, BLOCK_M]
    w_offset = n[:, None] * K + k[None, :]  # [BLOCK_N, BLOCK_K]
    live = (m < M)[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    acc_up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for k0 in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        w = tl.load(w_base + w_offset + k0)
        x = tl.load(x_tile + k0, mask=live, other=0.0)
        acc = tl.dot(w, x, acc)
        if GATED:
            up = tl.load(up_base + w_offset + k0)
            acc_up = tl.dot(up, x, acc_up)
    n = first_n + n
    y = acc
    if BIAS:
        y += tl.load(bias_ptr + n).to(tl.float32)[:, None]
    if GATED:
        y_up = acc_up
        if BIAS:
            y_up += tl.load(bias_ptr + N + n).to(tl.float32)[:, None]
        y = y / (1.0 + tl.exp(-y)) * y_up
    y_tile = y_ptr + m[None, :] * N + n[:, None]
    if ADD:
        y += tl.load(y_tile, mask=live, other=0.0).to(tl.float32)
    tl.store(y_tile, y.to(y_ptr.dtype.element_ty), mask=live)
