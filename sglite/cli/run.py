"""`sglite run FILE`: run a program file on a model.

The file runs as `__main__`, with the model as the default backend (a file that sets its own goes its own way).
Arguments after the file are the file's: `sglite run tree.py --model smollm2 -- --depth 3`.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import typer

import sglite
from sglite.errors import InvalidRequest


def command(
    context: typer.Context,
    file: str = typer.Argument(..., help="A Python file with a program."),
    model: str = typer.Option("smollm2", "--model", help="A known name, a folder, a GGUF file or a hub id."),
    url: str | None = typer.Option(None, "--url", help="Run on this sglite or SGLang server instead of a model here."),
    device: str = typer.Option("auto", "--device", help="'cpu', 'cuda' or 'auto'."),
    num_threads: int | None = typer.Option(
        None, "--num-threads", min=1, help="CPU threads; by default what the control group allows."
    ),
) -> None:
    """Run a program file with a model as its backend."""
    path = Path(file)
    if not path.is_file():
        raise InvalidRequest(f"{file} is not a file")
    if url is not None:
        sglite.set_default_backend(sglite.RuntimeEndpoint(url))
        run_file(path, context.args)
        return
    with sglite.Engine(model=model, device=device, num_threads=num_threads) as engine:
        sglite.set_default_backend(engine)
        run_file(path, context.args)


def run_file(path: Path, arguments: list[str]) -> None:
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.parent))
    runpy.run_path(str(path), run_name="__main__")
