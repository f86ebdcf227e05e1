from __future__ import annotations

import pytest

from sglite.errors import InvalidRequest
from sglite.runtime.config import EngineConfig
from sglite.runtime.device.registry import make_device


def test_deterministic_is_refused_with_what_holds_without_it() -> None:
    with pytest.raises(InvalidRequest, match="within about 1e-4"):
        make_device(EngineConfig(device="cpu", deterministic=True))


def test_a_numbered_cpu_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no device 'cpu:7'"):
        make_device(EngineConfig(device="cpu:7"))
