"""Functions of numbers and of one row."""

# numba's functions take no annotations: it finds the types by itself

from __future__ import annotations

import numpy as np

from sglite.runtime.device.cpu_kernels.compiling import inline
from sglite.runtime.device.cpu_kernels.words import floor, power_of_two


@inline
def exp(x):
    """e ** x for x <= 88, within 2 units in the last place; range reduction and polynomial as in Cephes' expf."""
    x = max(x, np.float32(-87.0))
    turns = floor(x * np.float32(1.44269504088896341) + np.float32(0.5))
    r = x - turns * np.float32(0.693359375) + turns * np.float32(2.12194440e-4)
    y = np.float32(1.9875691500e-4)
    y = y * r + np.float32(1.3981999507e-3)
    y = y * r + np.float32(8.3334519073e-3)
    y = y * r + np.float32(4.1665795894e-2)
    y = y * r + np.float32(1.6666665459e-1)
    y = y * r + np.float32(5.0000001201e-1)
    return (y * r * r + r + np.float32(1.0)) * power_of_two(np.int32(turns))


@inline
def normalise(source, weight, eps, target):
    """target = source * rsqrt(mean(source ** 2) + eps) * weight. One row."""
    squares = np.float32(0.0)
    for i in range(len(source)):
        squares += source[i] * source[i]
    scale = np.float32(1.0) / np.sqrt(squares / np.float32(len(source)) + eps)
    for i in range(len(source)):
        target[i] = source[i] * scale * weight[i]
