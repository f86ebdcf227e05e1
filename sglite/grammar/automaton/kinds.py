"""Which constraints are followed."""

from __future__ import annotations

import json

from sglite.protocol import GrammarSpec


def followed_text(spec: GrammarSpec, grammar: str) -> str | None:
    """The Lark text of kinds whose texts are read in one way only, so that positions tell all: what our front end
    wrote, and single expressions. A user's own Lark may hold terminals that end only where they are longest."""
    if spec.kind in ("json_schema", "json_object", "tools"):
        return grammar
    if spec.kind in ("regex", "choice"):
        return json.loads(grammar)["grammars"][0]["lark_grammar"]
    return None
