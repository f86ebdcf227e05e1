"""The constraint arguments of `gen` as a GrammarSpec, and how the text becomes a value.

    schema       JSON schema in any form -> a validated object: of a pydantic model or type, else plain JSON values
    json_schema  JSON schema             -> the text
    dtype        int, float, str, bool   -> the text, as SGLang gives it
    regex, ebnf, lark                    -> the text

A number ends where the model goes on with a blank or a new line, which is taken off again: models end a turn after a
number far more rarely than they go on writing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pydantic

from sglite.errors import ProgramSyntaxError
from sglite.grammar import spec as specs
from sglite.protocol import GrammarSpec, OnUnsupported, Whitespace

INT = r"[-+]?[0-9]+[ \n]?"
FLOAT = r"[-+]?[0-9]*\.?[0-9]+[ \n]?"
BOOL = r"(True|False)"
STRING = r'"([^"\\\x00-\x1f]|\\(["\\/bfnrt]|u[0-9a-fA-F]{4}))*"'

# name -> (regex, texts that end the value)
_DTYPES: dict[str, tuple[str, tuple[str, ...]]] = {
    "int": (INT, (" ", "\n")),
    "float": (FLOAT, (" ", "\n")),
    "bool": (BOOL, ()),
    "str": (STRING, ()),
}


@dataclass(frozen=True, slots=True)
class Constraint:
    """`parse` None: the value is the text. `stop`: texts that end the value and are not part of it."""

    spec: GrammarSpec
    parse: Callable[[str], Any] | None = None
    stop: tuple[str, ...] = ()


def constraint(kind: str, value: Any, *, whitespace: Whitespace, on_unsupported: OnUnsupported) -> Constraint:
    """`kind` is the argument's name. Raises GrammarError or ProgramSyntaxError."""
    match kind:
        case "schema":
            schema, parse = _typed(value)
            return Constraint(specs.json_schema(schema, whitespace=whitespace, on_unsupported=on_unsupported), parse)
        case "json_schema":
            return Constraint(specs.json_schema(value, whitespace=whitespace, on_unsupported=on_unsupported))
        case "regex":
            return Constraint(specs.regex(value))
        case "ebnf":
            return Constraint(specs.ebnf(value))
        case "lark":
            return Constraint(specs.lark(value))
        case "dtype":
            name = value if isinstance(value, str) else getattr(value, "__name__", "")
            if name not in _DTYPES:
                raise ProgramSyntaxError(f"dtype must be int, float, str or bool, not {value!r}", param="dtype")
            pattern, stop = _DTYPES[name]
            return Constraint(specs.regex(pattern), stop=stop)
        case _:
            raise ProgramSyntaxError(f"{kind} is not a constraint", param=kind)


def _typed(given: Any) -> tuple[Any, Callable[[str], Any]]:
    """(the schema, what makes the value of the text). Raises InvalidGrammar for a type that pydantic does not know."""
    if isinstance(given, str | bool | Mapping):
        return given, json.loads
    try:
        adapter = given if isinstance(given, pydantic.TypeAdapter) else pydantic.TypeAdapter(given)
        return closed(adapter.json_schema()), adapter.validate_json
    except (pydantic.errors.PydanticUserError, pydantic.errors.PydanticSchemaGenerationError) as error:
        raise specs.no_schema(given, error) from error


def closed(schema: Any) -> Any:
    """The schema with no other properties than those named, where it does not say whether there may be others.

    A Python type names all its fields, and validation drops others: a model would write them for nothing. A schema
    given as JSON is left as it is.
    """
    if not isinstance(schema, dict):
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ("properties", "$defs"):
            made[key] = {name: closed(each) for name, each in value.items()}
        elif key in ("anyOf", "oneOf", "prefixItems"):
            made[key] = [closed(each) for each in value]
        elif key in ("items", "additionalProperties"):
            made[key] = closed(value)
        else:
            made[key] = value
    if made.get("type") == "object" and "properties" in made:
        made.setdefault("additionalProperties", False)
    return made
