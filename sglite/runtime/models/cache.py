"""Where converted models live: `$SGLITE_HOME` (default ~/.cache/sglite). A model's folder is complete or not there."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from sglite.home import home

FORMAT = 1  # of what the converters write; a new number makes every model convert again


def model_folder(key: str) -> Path:
    """Where the model of that key is kept, cached or not."""
    return home() / f"models-v{FORMAT}" / key


def is_cached(key: str) -> bool:
    return (model_folder(key) / "config.json").is_file()


def cached_models() -> list[Path]:
    """The folders of all complete models, by name."""
    return sorted(file.parent for file in (home() / f"models-v{FORMAT}").glob("*/config.json"))


def build_once(key: str, build: Callable[[Path], None]) -> Path:
    """The model's folder; `build(folder)` fills it where it is not there yet.

    One process builds, others wait for it. A build that fails or is killed leaves nothing that counts as a model.
    """
    target = model_folder(key)
    if is_cached(key):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{target}.lock"):
        if is_cached(key):
            return target
        partial = target.with_name(f"{target.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            build(partial)
            partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return target
