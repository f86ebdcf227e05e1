"""The folder in which sglite keeps what it made and can make again: converted models, compiled kernels, byte code."""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    """It need not exist. `SGLITE_HOME` moves it from ~/.cache/sglite."""
    configured = os.environ.get("SGLITE_HOME")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "sglite"
