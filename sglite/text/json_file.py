"""A JSON object in a file of a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sglite.errors import UnsupportedModel


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises UnsupportedModel for anything else."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UnsupportedModel(f"{file} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UnsupportedModel(f"{file} holds no JSON object")
    return value
