"""Where and in what type kernel tests run. The interpreter's tl.dot knows no bfloat16."""

from __future__ import annotations

import torch

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPE = torch.bfloat16 if ON_GPU else torch.float16
TOLERANCE = 1e-2 if ON_GPU else 2e-3


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape) * scale).to(DTYPE).to(DEVICE)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative, in the 2-norm; NaN is an error of infinity."""
    value = ((got.float() - want.float()).norm() / want.float().norm().clamp_min(1e-20)).item()
    return value if value == value else float("inf")
