"""The JSON-schema front end: parse, resolve, normalise, prove, emit.

    text --values--> value --document--> nodes --terms/expand--> cases per conjunction of nodes
         --emit (objects, arrays, strings, numbers)--> grammar --> Lark text for llguidance

`prepare` is the one entry. It holds no state.
"""

from __future__ import annotations

from sglite.grammar.schema.prepare import prepare
from sglite.grammar.schema.types import PreparedSchema, SchemaLimits

__all__ = ["PreparedSchema", "SchemaLimits", "prepare"]
