"""Command-line options made from the fields of configuration classes, so that an option is written down once."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import typer


def option_parameters(
    config: type, *, skip: Sequence[str] = (), flags: Mapping[str, str] | None = None
) -> list[inspect.Parameter]:
    """One keyword parameter for each plain field; its help is the field's. `flags`: other spellings by field name."""
    hints = typing.get_type_hints(config)
    found: list[inspect.Parameter] = []
    for field in dataclasses.fields(config):
        if field.name in skip or "help" not in field.metadata:
            continue
        many = typing.get_origin(hints[field.name]) is tuple
        kind = list[str] if many else hints[field.name]
        flag = (flags or {}).get(field.name, f"--{field.name.replace('_', '-')}")
        names = [flag, f"--no-{flag[2:]}"] if bool in (kind, *typing.get_args(kind)) else [flag]
        option = typer.Option(
            "/".join(names),
            help=_help(field),
            show_default=field.default not in (None, (), ""),
        )
        default: Any = list(cast(tuple[str, ...], field.default)) if many else field.default
        annotation = typing.Annotated[kind, option]
        found.append(
            inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        )
    return found


def with_options(parameters: Sequence[inspect.Parameter]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a function of `**values` the parameters that typer reads."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        function.__signature__ = inspect.Signature(list(parameters))  # type: ignore[attr-defined]
        function.__annotations__ = {p.name: p.annotation for p in parameters}
        return function

    return decorate


def built(config: type, values: Mapping[str, Any]) -> Any:
    """The configuration out of a command's values; the others are left alone."""
    names = {field.name for field in dataclasses.fields(config)}
    return config(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items() if k in names})


def _help(field: dataclasses.Field[Any]) -> str:
    choices = field.metadata.get("choices") or ()
    text = str(field.metadata["help"])
    return f"{text} [{'|'.join(map(str, choices))}]" if choices else text
