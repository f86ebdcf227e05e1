"""`sglite run FILE`: run a program file on a model.

The file runs as `__main__`, with the model as the default backend (a file that sets its own goes its own way).
Arguments after the file are the file's: `sglite run tree.py --model smollm2 -- --depth 3`. An error that leaves the
file is shown as Python shows it, without the frames of sglite; exit status 1.
"""

from __future__ import annotations

import runpy
import sys
import traceback
from pathlib import Path

import typer

import sglite
from sglite.errors import InvalidRequest, ProgramError, SgliteError

# Of frames: what calls the file, and what the file calls here.
_NOT_SHOWN = (str(Path(sglite.__file__).parent), str(Path(typer.__file__).parent), runpy.__file__, "<frozen runpy>")


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
    path = checked_file(file)
    if url is not None:
        sglite.set_default_backend(sglite.RuntimeEndpoint(url))
        run_file(path, context.args)
        return
    with sglite.Engine(model=model, device=device, num_threads=num_threads) as engine:
        sglite.set_default_backend(engine)
        run_file(path, context.args)


def checked_file(file: str) -> Path:
    """Before a model is loaded. Raises InvalidRequest, and typer.Exit for a file that is not Python."""
    path = Path(file)
    if not path.is_file():
        raise InvalidRequest(f"{file} is not a file")
    try:
        compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise _shown(error) from None
    return path


def run_file(path: Path, arguments: list[str]) -> None:
    """Raises typer.Exit for an error that leaves the file, once it has been shown."""
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.parent))
    try:
        runpy.run_path(str(path), run_name="__main__")
    except Exception as error:  # noqa: BLE001 - whatever the user's own code raises is the user's to see
        raise _shown(error) from None


def _shown(error: BaseException) -> typer.Exit:
    """Print the error with the frames of the user's code and of the libraries that it calls."""
    shown = traceback.TracebackException.from_exception(error, compact=True)
    _keep_users(shown, error)
    print("".join(shown.format()), end="", file=sys.stderr)
    return typer.Exit(1)


def _keep_users(shown: traceback.TracebackException | None, error: BaseException | None) -> None:
    """In `shown`, made of `error`, and in what it came from."""
    if shown is None or error is None:
        return
    shown.stack[:] = [frame for frame in shown.stack if not frame.filename.startswith(_NOT_SHOWN)]
    if isinstance(error, SgliteError) and not isinstance(error, ProgramError):  # its text says all
        shown.__cause__ = shown.__context__ = None
    _keep_users(shown.__cause__, error.__cause__)
    _keep_users(shown.__context__, error.__context__)
