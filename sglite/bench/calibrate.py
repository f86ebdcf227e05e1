"""What the machine can do, measured in the run that is judged by it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Rates:
    copy: float  # bytes read and written per second in a large copy
    matmul: float  # operations per second of a large matrix product in the model's type


def calibrate(device: torch.device, dtype: torch.dtype) -> Rates:
    rates = Rates(_copy_rate(device), _matmul_rate(device, dtype))
    if device.type != "cpu":
        torch.accelerator.empty_cache()
    return rates


def _copy_rate(device: torch.device) -> float:
    """Through a kernel, as a model reads its weights: the copy engines are slower."""
    size = _GIB // 4 if device.type == "cpu" else _GIB
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * size / _seconds(lambda: torch.add(source, 1.0, out=target), device)


def _matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Of random values: zeros take less power and run faster."""
    width = 1024 if device.type == "cpu" else 8192
    a, b = (torch.randn(width, width, device=device).to(dtype) for _ in range(2))
    return 2 * width**3 / _seconds(lambda: torch.mm(a, b), device)


def _seconds(work: Callable[[], object], device: torch.device, *, repeats: int = 10) -> float:
    """Median over single runs after three unmeasured ones. Inputs are far larger than any cache."""
    for _ in range(3):
        work()
    times: list[float] = []
    for _ in range(repeats):
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        began = time.perf_counter()
        work()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        times.append(time.perf_counter() - began)
    return sorted(times)[repeats // 2]
