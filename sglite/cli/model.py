"""`sglite model pull NAME` and `sglite model list`."""

from __future__ import annotations

from pathlib import Path

import typer

from sglite.runtime.models import cache
from sglite.runtime.models.pull import BUILT_IN
from sglite.runtime.models.sources import DEFAULT_MODEL, resolve_model

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def pull(
    name: str = typer.Argument(DEFAULT_MODEL, help="A built-in name, a hub id 'owner/name' or a .gguf file."),
) -> None:
    """Fetch a model and convert it where needed, so that its first use finds it ready. Prints its folder."""
    print(resolve_model(name).folder)


@app.command("list")
def list_models() -> None:
    """List the built-in models and everything that is cached."""
    for name, model in BUILT_IN.items():
        print(f"{name:<24} {_state(cache.model_folder(name)):<16} {model.description}")
    for folder in cache.cached_models():
        if folder.name not in BUILT_IN:
            print(f"{folder.name:<24} {_state(folder):<16} {folder}")


def _state(folder: Path) -> str:
    if not (folder / "config.json").is_file():
        return "not cached"
    size = sum(file.stat().st_size for file in folder.iterdir())
    return f"cached, {size / 1e6:.0f} MB"
