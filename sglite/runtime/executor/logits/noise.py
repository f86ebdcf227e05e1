"""Counter-based Gumbel noise: the noise of a token depends on (seed, k, token id) alone.

Adding independent standard Gumbel noise to the logits and taking the largest is a draw from their softmax. As the
noise is a hash and no state, the k-th output token of a request is the same whoever shares its batch, in whatever
order rows stand, on every device, with drafts or without, and a kernel can make it in the pass that finds the
maximum. All integers are unsigned 32 bit and wrap; `>>` is a logical shift.

    host, once per draw:    z = splitmix64(seed + (k + 1) * 0x9E3779B97F4A7C15)      (unsigned 64 bit)
                            key0, key1 = z & 0xFFFFFFFF, z >> 32
    device, per token id t: x = t ^ key0
                            x ^= x >> 16; x *= 0x7FEB352D; x ^= x >> 15; x *= 0x846CA68B; x ^= x >> 16
                            x += key1
                            x ^= x >> 15; x *= 0x2C1B3C6D; x ^= x >> 12; x *= 0x297A2D39; x ^= x >> 15
                            w = min((float32(x >> 1) + 0.5) * 2 ** -31, 1 - 2 ** -24)
                            noise = -log(-log1p(-w))

The rounds are the `lowbias32` mixer and a second one with other constants (Wellons, "Prospecting for hash functions",
2018). w is small where the noise is large, so the tail that decides rare tokens has the full 31 bits; the noise lies
between -2.82 and 22.2.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from sglite.runtime.batch import IntArray

MAX_NOISE = 22.2
MIN_NOISE = -2.82

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def noise_keys(seeds: NDArray[np.uint64] | Sequence[int], indices: IntArray) -> IntArray:
    """int32[S, 2] (bits of uint32): the draws of output tokens `indices`  # [S]  of requests with `seeds`  # [S]."""
    with np.errstate(over="ignore"):
        z = np.asarray(seeds, dtype=np.uint64) + (np.asarray(indices).astype(np.uint64) + np.uint64(1)) * _GOLDEN
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return z[:, None].view(np.int32)  # little endian: low word first


def gumbel_noise(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """float32[S, C]: the noise of token_ids  # int32[C] or [S, C]  under keys  # int32[S, 2]."""
    x = token_ids ^ keys[:, :1]
    _mix(x, (16, 15, 16), (0x7FEB352D, 0x846CA68B))
    x += keys[:, 1:]
    _mix(x, (15, 12, 15), (0x2C1B3C6D, 0x297A2D39))
    w = (x >> 1).bitwise_and_(0x7FFFFFFF).float()
    w.add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return w.neg_().log1p_().neg_().log_().neg_()


def _mix(x: torch.Tensor, shifts: tuple[int, int, int], factors: tuple[int, int]) -> None:
    """In place. int32 arithmetic wraps like uint32; a logical shift is an arithmetic one and a mask."""
    for shift, factor in zip(shifts, (*factors, None), strict=True):
        x ^= (x >> shift).bitwise_and_((1 << (32 - shift)) - 1)
        if factor is not None:
            x *= factor - (1 << 32) if factor >= 1 << 31 else factor
