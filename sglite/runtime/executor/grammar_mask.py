"""The bitmask buffers that the host fills while the device computes.

Two of them in turn: the loop waits for step n - 1 before it fills the masks of step n + 1, so the copy of the buffer
that it fills was over with step n - 1.
"""

from __future__ import annotations

import torch

from sglite.grammar.matcher import Bitmask
from sglite.runtime.device.base import Device

_BUFFERS = 2


class MaskRing:
    def __init__(self, device: Device, rows: int, vocab_size: int) -> None:
        words = -(-vocab_size // 32)
        self._buffers = [device.host_buffer((rows, words), torch.int32) for _ in range(_BUFFERS)]
        self._arrays: list[Bitmask] = [buffer.numpy() for buffer in self._buffers]
        self._turn = 0

    def turn(self) -> None:
        """Go on to the next step's buffer."""
        self._turn = (self._turn + 1) % _BUFFERS

    @property
    def host_array(self) -> Bitmask:
        return self._arrays[self._turn]

    @property
    def host_tensor(self) -> torch.Tensor:
        return self._buffers[self._turn]
