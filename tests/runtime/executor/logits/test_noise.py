"""The counter-based noise: exact values, the right distribution, nothing shared between draws."""

from __future__ import annotations

import numpy as np
import torch

from sglite.runtime.executor.logits.noise import MAX_NOISE, MIN_NOISE, gumbel_noise, noise_keys


def plain_noise(seed: int, k: int, token: int) -> float:
    """The definition in the module's docstring, in Python integers."""
    mask64, mask32 = (1 << 64) - 1, (1 << 32) - 1
    z = (seed + (k + 1) * 0x9E3779B97F4A7C15) & mask64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask64
    z ^= z >> 31
    x = token ^ (z & mask32)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        x = ((x ^ (x >> shift)) * factor) & mask32
    x = (x + (z >> 32)) & mask32
    for shift, factor in ((15, 0x2C1B3C6D), (12, 0x297A2D39), (15, 1)):
        x = ((x ^ (x >> shift)) * factor) & mask32
    w = min((np.float32(x >> 1) + np.float32(0.5)) * np.float32(2.0**-31), np.float32(1 - 2.0**-24))
    return float(-np.log(-np.log1p(-np.float64(w))))


def noise(seeds: list[int], ks: list[int], tokens: int) -> torch.Tensor:
    keys = torch.from_numpy(noise_keys(seeds, np.array(ks, np.int32)))
    return gumbel_noise(keys, torch.arange(tokens, dtype=torch.int32))


def test_follows_the_definition() -> None:
    seeds, ks = [0, 1, 12345, (1 << 64) - 1], [0, 7, 1000, 3]
    found = noise(seeds, ks, 200)
    expected = [[plain_noise(s, k, t) for t in range(200)] for s, k in zip(seeds, ks, strict=True)]
    torch.testing.assert_close(found, torch.tensor(expected), atol=1e-5, rtol=1e-5)


def test_is_standard_gumbel() -> None:
    found = noise(list(range(50)), [3] * 50, 20_000).double()
    assert abs(found.mean() - 0.57722) < 0.005
    assert abs(found.var() - np.pi**2 / 6) < 0.01
    quantiles = torch.tensor([0.001, 0.01, 0.5, 0.99, 0.999, 0.9999], dtype=torch.double)
    observed = torch.tensor(np.quantile(found.numpy(), quantiles.numpy()))
    torch.testing.assert_close(observed, -(-quantiles.log()).log(), atol=0.2, rtol=0.02)
    assert found.min() >= MIN_NOISE
    assert found.max() <= MAX_NOISE


def test_steps_seeds_and_tokens_are_uncorrelated() -> None:
    steps = noise([5] * 64, list(range(64)), 4000).double()
    seeds = noise(list(range(64)), [5] * 64, 4000).double()
    for found in (steps, seeds):
        correlation = torch.corrcoef(found) - torch.eye(64)
        assert correlation.abs().max() < 0.08  # 5 standard deviations of 1 / sqrt(4000)
    neighbours = torch.corrcoef(torch.stack((steps[:, :-1].flatten(), steps[:, 1:].flatten())))[0, 1]
    assert abs(neighbours) < 0.01


def test_a_subset_of_tokens_has_the_same_noise() -> None:
    keys = torch.from_numpy(noise_keys([9], np.array([4], np.int32)))
    ids = torch.tensor([[17, 3, 900]], dtype=torch.int32)
    torch.testing.assert_close(gumbel_noise(keys, ids)[0], noise([9], [4], 1000)[0][ids[0]])
