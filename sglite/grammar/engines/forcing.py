"""Grammars of which llguidance is not asked what text is forced.

Its lexer takes terminals as long as they go on. Where a user's terminals meet so that the first one can never end
(`A "ab"` with `A: /a+/`), one byte is forced after the other for ever, and llguidance looks for their end without any
limit of its own, whenever a mask is made. What our front end writes has terminals that end by themselves; what users
write may not.
"""

from __future__ import annotations

import json

_DECLARED = '%llguidance {"no_forcing": true}'


def unforced(lark: str) -> str:
    """The same grammar. The last declaration counts, so that no other one in the text undoes it."""
    return f"{lark}\n{_DECLARED}\n"


def is_forced(grammar: str) -> bool:
    """Of what goes to the engine, a Lark text or several in JSON: whether forced text may be asked for."""
    return not grammar.endswith(f"\n{_DECLARED}\n") and json.dumps(f"\n{_DECLARED}\n")[1:-1] not in grammar
