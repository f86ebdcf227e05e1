"""Device name -> device, imported when first asked for."""

from __future__ import annotations

import importlib
from typing import Protocol, cast

import torch

from sglite.errors import InvalidRequest
from sglite.runtime.config import EngineConfig
from sglite.runtime.device.base import Device

_MODULES = {"cpu": "sglite.runtime.device.cpu", "cuda": "sglite.runtime.device.cuda.device"}


class _DeviceModule(Protocol):
    def make(self, name: str, config: EngineConfig) -> Device: ...


def device_name(config: EngineConfig) -> str:
    """`config.device`, with "auto" decided: a GPU where there is one."""
    if config.device != "auto":
        return config.device
    gpu = torch.accelerator.is_available() and torch.accelerator.current_accelerator() == torch.device("cuda")
    return "cuda" if gpu else "cpu"


def make_device(config: EngineConfig) -> Device:
    """Raises InvalidRequest for a device that is not there."""
    name = device_name(config)
    module = _MODULES.get(name.partition(":")[0])
    if module is None:
        raise InvalidRequest(f"no device {name!r}; what works: 'auto', 'cpu', 'cuda', 'cuda:1'", param="device")
    return cast(_DeviceModule, importlib.import_module(module)).make(name, config)
