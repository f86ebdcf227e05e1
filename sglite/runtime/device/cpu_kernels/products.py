"""A span of panels of a projection, for all rows."""

# numba's functions take no annotations: it finds the types by itself

from __future__ import annotations

import numpy as np
from numba import carray

from sglite.runtime.device.cpu_kernels.arithmetic import exp
from sglite.runtime.device.cpu_kernels.compiling import inline
from sglite.runtime.device.cpu_kernels.layout import TILE_BYTES
from sglite.runtime.device.cpu_kernels.vectors import MAX_TILE, PANEL, tile1, tile2, tile3, tile4, tile5, tile6
from sglite.runtime.device.cpu_kernels.words import floats


@inline
def _tile(rows, weights, x, stride, count, ahead, out):
    if rows == 1:
        tile1(weights, x, stride, count, ahead, out)
    elif rows == 6:
        tile6(weights, x, stride, count, ahead, out)
    elif rows == 5:
        tile5(weights, x, stride, count, ahead, out)
    elif rows == 4:
        tile4(weights, x, stride, count, ahead, out)
    elif rows == 3:
        tile3(weights, x, stride, count, ahead, out)
    else:
        tile2(weights, x, stride, count, ahead, out)


@inline
def product_chunk(args, chunk, scratch):
    """out = x @ weights + bias + residual for a span of panels."""
    span, x, rows, inputs = args[2], args[3], args[4], args[5]
    weights, outputs, bias, residual, out_address = args[6], args[7], args[8], args[9], args[10]
    panel_bytes = inputs * PANEL * 4
    panels = (outputs + PANEL - 1) // PANEL
    sums = carray(floats(scratch), (MAX_TILE, PANEL))
    out = carray(floats(out_address), (rows, outputs))
    for panel in range(chunk * span, min((chunk + 1) * span, panels)):
        place = weights + panel * panel_bytes
        first = panel * PANEL
        width = min(PANEL, outputs - first)
        row = 0
        groups = (rows + MAX_TILE - 1) // MAX_TILE
        while groups > 0:
            count = (rows - row + groups - 1) // groups
            ahead = place + (panel_bytes if groups == 1 and rows > 1 else 2048)
            _tile(count, place, x + row * inputs * 4, inputs, inputs, ahead, scratch)
            if bias != 0:
                added = carray(floats(bias), (outputs,))
                for r in range(count):
                    for j in range(width):
                        sums[r, j] += added[first + j]
            if residual != 0:
                stream = carray(floats(residual), (rows, outputs))
                for r in range(count):
                    for j in range(width):
                        out[row + r, first + j] = sums[r, j] + stream[row + r, first + j]
            else:
                for r in range(count):
                    for j in range(width):
                        out[row + r, first + j] = sums[r, j]
            row += count
            groups -= 1


@inline
def gated_chunk(args, chunk, scratch):
    """out = silu(x @ gate) * (x @ up) for a span of panels; gate's panels, then up's."""
    span, x, rows, inputs = args[2], args[3], args[4], args[5]
    weights, outputs, out_address = args[6], args[7], args[10]
    panel_bytes = inputs * PANEL * 4
    panels = (outputs + PANEL - 1) // PANEL
    gate = carray(floats(scratch), (MAX_TILE, PANEL))
    up = carray(floats(scratch + TILE_BYTES // 2), (MAX_TILE, PANEL))
    out = carray(floats(out_address), (rows, outputs))
    for panel in range(chunk * span, min((chunk + 1) * span, panels)):
        gate_place = weights + panel * panel_bytes
        up_place = weights + (panels + panel) * panel_bytes
        first = panel * PANEL
        width = min(PANEL, outputs - first)
        row = 0
        groups = (rows + MAX_TILE - 1) // MAX_TILE
        while groups > 0:
            count = (rows - row + groups - 1) // groups
            ahead = panel_bytes if groups == 1 and rows > 1 else 2048
            start = x + row * inputs * 4
            for half in range(2):
                place = up_place if half else gate_place
                _tile(count, place, start, inputs, inputs, place + ahead, scratch + half * (TILE_BYTES // 2))
            for r in range(count):
                for j in range(PANEL):
                    g = gate[r, j]
                    up[r, j] *= g / (np.float32(1.0) + exp(min(-g, np.float32(88.0))))
                for j in range(width):
                    out[row + r, first + j] = up[r, j]
            row += count
            groups -= 1
