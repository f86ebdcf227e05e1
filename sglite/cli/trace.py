"""`sglite trace FILE`: run a program file and write a timeline of every program that it ran.

The page is one HTML file that needs nothing else. `--out run.json` writes the same as JSON, `--out run.trace.json` as
Chrome's trace format for ui.perfetto.dev.
"""

from __future__ import annotations

import sys
from pathlib import Path

import typer

import sglite
from sglite.cli.run import checked_file, run_file
from sglite.errors import InvalidRequest
from sglite.lang.config import global_config
from sglite.lang.timeline import write_timelines


def command(
    context: typer.Context,
    file: str = typer.Argument(..., help="A Python file with a program."),
    out: str = typer.Option("timeline.html", "--out", help="Where to write: .html, .json or .trace.json."),
    model: str = typer.Option("smollm2", "--model", help="A known name, a folder, a GGUF file or a hub id."),
    device: str = typer.Option("auto", "--device", help="'cpu', 'cuda' or 'auto'."),
) -> None:
    """Run a program file and show what happened when."""
    path = checked_file(file)
    if Path(out).suffix not in (".html", ".json"):
        raise InvalidRequest(f"--out {out}: the name must end with .html, .json or .trace.json")
    timelines = global_config.timelines = []
    with sglite.Engine(model=model, device=device) as engine:
        sglite.set_default_backend(engine)
        try:
            run_file(path, context.args)
        finally:  # a program that failed is what a timeline is wanted for
            global_config.timelines = None
            if timelines:
                runs = "1 run" if len(timelines) == 1 else f"{len(timelines)} runs"
                print(f"timeline of {runs}: {write_timelines(timelines, out)}", file=sys.stderr)
    if not timelines:
        raise InvalidRequest(
            f"{file} has run no program, so there is no timeline: call one in it, for example under "
            'if __name__ == "__main__": my_program.run(...)'
        )
