"""The `sglite` command.

Each subcommand is a module beside this one, named in `COMMANDS` and imported only when it is called, so `sglite --help`
stays fast and a broken command takes no other one with it. A module gives either `command`, a function (one command),
or `app`, a typer.Typer (a group). Errors of the tree in errors.py are printed in one line; exit status 1.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType

import typer

from sglite import bytecode
from sglite._version import __version__
from sglite.errors import SgliteError


@dataclass(frozen=True)
class Command:
    """`help` is the line in `sglite --help`; the module's own docstring says the rest."""

    module: str
    help: str
    passes_on: bool = False  # unknown arguments and options are handed to the command as they are


COMMANDS: dict[str, Command] = {
    "generate": Command("sglite.cli.generate", "Complete a prompt, under a schema or regex where one is given."),
    "chat": Command("sglite.cli.chat", "Talk with a model in the terminal."),
    "run": Command("sglite.cli.run", "Run a program file with a model.", passes_on=True),
    "trace": Command("sglite.cli.trace", "Run a program file and show what happened when.", passes_on=True),
    "serve": Command("sglite.cli.serve", "Serve a model over an OpenAI-compatible HTTP API."),
    "batch": Command("sglite.cli.batch", "Answer a file of OpenAI batch requests, offline."),
    "bench": Command("sglite.cli.bench", "Measure speed."),
    "grammar": Command("sglite.cli.grammar", "Check or explain a JSON schema or another constraint."),
    "model": Command("sglite.cli.model", "Fetch and list models."),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; ends the process with its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with bytecode.kept():
            _app(given[0] if given else None)(args=given, prog_name="sglite")
    except SgliteError as error:
        print(f"sglite: error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # `sglite ... | head`: the reader has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)


def _app(name: str | None) -> typer.Typer:
    """An app that knows one command for real, or (for --help and misspelled names) all of them by their help line."""
    app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.callback()(_root)
    if name in COMMANDS:
        _register(app, name, COMMANDS[name])
        return app
    for each, command in COMMANDS.items():
        if find_spec(command.module) is not None:
            app.command(each, help=command.help)(_unreachable)
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"sglite {__version__}")
        raise typer.Exit


def _root(
    version: bool = typer.Option(
        False, "--version", help="Show the version and exit.", is_eager=True, callback=_show_version
    ),
) -> None:
    """Programs for language models: structured output, forks and joins, on one engine."""


def _unreachable() -> None:
    raise AssertionError("a command that is named is imported")


def _register(app: typer.Typer, name: str, command: Command) -> None:
    module = _load(command.module)
    group = getattr(module, "app", None)
    if isinstance(group, typer.Typer):
        app.add_typer(group, name=name, help=command.help, no_args_is_help=True)
        return
    settings = {"ignore_unknown_options": True, "allow_extra_args": True} if command.passes_on else None
    app.command(name, context_settings=settings)(module.command)


def _load(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        print(f"sglite: error: this installation has no {module.rpartition('.')[2]!r} command", file=sys.stderr)
        sys.exit(1)
