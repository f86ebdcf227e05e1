"""`sglite batch IN.jsonl OUT.jsonl`: answer a file of OpenAI batch requests, offline."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sglite.cli.config_options import built, option_parameters, with_options
from sglite.runtime.config import EngineConfig

_KIND = inspect.Parameter.KEYWORD_ONLY
_SOME_FAILED = 3  # 1 is an error that stopped the command, 2 a wrong command line


@with_options(
    [
        inspect.Parameter("source", _KIND, annotation=Annotated[Path, typer.Argument(metavar="IN.jsonl", exists=True)]),
        inspect.Parameter("target", _KIND, annotation=Annotated[Path, typer.Argument(metavar="OUT.jsonl")]),
        inspect.Parameter(
            "strict",
            _KIND,
            default=False,
            annotation=Annotated[bool, typer.Option("--strict", help="Exit status 3 where a line got an error.")],
        ),
        *option_parameters(EngineConfig, skip=("served_name",)),
    ]
)
def command(*, source: Path, target: Path, strict: bool, **values: Any) -> None:
    """Answer every request of IN.jsonl (OpenAI's batch lines) into OUT.jsonl.

    A line that is no request gets an error line there and stops no other. Run it again after an interruption: what
    OUT.jsonl answers is not asked again. The exit status is 0 though lines have errors, 3 with --strict.
    """
    # Everything that takes a moment to load is for a file that holds requests.
    from sglite.runtime.server.batch import BatchCounts, check, run_batch

    check(source)
    from sglite.runtime.async_engine import Engine
    from sglite.runtime.server.app import create_app
    from sglite.runtime.server.config import ServerConfig

    config: EngineConfig = built(EngineConfig, values)
    console = Console(stderr=True)
    with console.status(f"loading {config.model}"):
        engine = Engine(config=config)
    # Twice the rows: the next requests are ready when rows get free. A batch has no deadline.
    running = 2 * config.max_rows
    server = ServerConfig(max_running=running, log_requests=False, request_timeout_s=10**9)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with engine, Progress(*columns, console=console) as progress:
        task = progress.add_task("answering", total=None)

        def show(counts: BatchCounts) -> None:
            progress.update(task, total=counts.total, completed=counts.before + counts.done)

        app = create_app(engine, server)
        counts = asyncio.run(run_batch(app, source, target, concurrency=running, on_progress=show))
    errors = f"{counts.failed} of them with an error"
    if counts.invalid:
        errors += f" ({counts.invalid} lines are no requests)"
    before = f"{counts.before} from before"
    if counts.failed_before:
        before += f" ({counts.failed_before} of them with an error)"
    console.print(f"{counts.done} answered, {errors}, {before}")
    if strict and counts.failed + counts.failed_before:
        raise typer.Exit(_SOME_FAILED)
