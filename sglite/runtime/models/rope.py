"""Rotary position embeddings as one table of cosines and sines, whatever the scaling."""

from __future__ import annotations

import math

import torch

from sglite.runtime.models.config import LinearScaling, Llama3Scaling, ModelConfig, YarnScaling


def rope_table(config: ModelConfig, max_len: int) -> torch.Tensor:
    """float32[max_len, head_dim] on the CPU: cos of the head_dim / 2 angles of each position, then their sin.

    The angles are float32 products, as in the training of these models; a table in float64 would differ from them
    at far positions.
    """
    frequencies, magnitude = _frequencies(config)
    positions = torch.arange(max_len, dtype=torch.float32)
    angles = torch.outer(positions, frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * magnitude


def _frequencies(config: ModelConfig) -> tuple[torch.Tensor, float]:
    """(float32[head_dim / 2] radians per position, factor on cos and sin)."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    plain = 1.0 / config.rope_theta**exponents
    match config.rope_scaling:
        case None:
            return plain, 1.0
        case LinearScaling(factor=factor):
            return plain / factor, 1.0
        case Llama3Scaling() as scaling:
            return _llama3(plain, scaling), 1.0
        case YarnScaling() as scaling:
            return _yarn(plain, scaling, config), _yarn_magnitude(scaling)


def _llama3(plain: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Wavelengths above original / low are stretched by `factor`, those below original / high are kept."""
    turns = scaling.original_max_position_embeddings * plain / (2 * math.pi)  # within the original context
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return (1 - keep) * plain / scaling.factor + keep * plain


def _yarn(plain: torch.Tensor, scaling: YarnScaling, config: ModelConfig) -> torch.Tensor:
    """YaRN, arXiv 2309.00071, section 3.2: dimensions that turn often are kept, slow ones are interpolated."""

    def dimension(turns: float) -> float:
        length = scaling.original_max_position_embeddings
        return config.head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.head_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp
    stretched = (torch.arange(config.head_dim // 2, dtype=torch.float32) - low) / (high - low)
    stretched = stretched.clamp(0.0, 1.0)
    return stretched * plain / scaling.factor + (1 - stretched) * plain


def _yarn_magnitude(scaling: YarnScaling) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * weight * math.log(scaling.factor) + 1.0

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return mscale(scaling.mscale) / mscale(scaling.mscale_all_dim)
    return mscale(1.0)
