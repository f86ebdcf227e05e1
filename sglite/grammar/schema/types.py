"""What the schema front end hands out.

    JSON schema text --prepare()--> PreparedSchema: a Lark grammar for llguidance, a Coverage report,
                                    rules beside the grammar, a validator, a key order

The grammar is exact for everything that the coverage does not call "validated": it accepts the canonical
spellings of the valid values (compact or single-blank white space, keys in schema order with undeclared
keys last, one spelling per string) and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from sglite.grammar.residual.rules import ResidualRules
from sglite.protocol import Coverage


class SchemaLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a schema may cost before it is refused with GrammarTooLarge."""

    max_bytes: int = 4 << 20  # of the schema's JSON text
    max_depth: int = 256  # of nesting of the schema's JSON text
    max_nodes: int = 200_000  # JSON values in the schema
    max_number_digits: int = 400  # of one number in the schema
    max_rules: int = 100_000  # of the grammar that comes out
    max_branches: int = 256  # alternatives that one value may fall into
    max_steps: int = 20_000  # of normalising; about 50 microseconds each


class Validator(Protocol):
    def __call__(self, text: str) -> str | None: ...


@dataclass(frozen=True, slots=True)
class PreparedSchema:
    lark: str  # for LLMatcher.grammar_from_lark; never holds titles, descriptions or x-guidance
    coverage: Coverage
    key_order: Any = field(repr=False)  # JSON value -> the same value with its keys in the order of the grammar
    validator: Validator = field(repr=False)
    residual: ResidualRules | None = None  # what must be kept beside the grammar

    def validate(self, text: str) -> str | None:
        """Why `text` is not a valid value of the schema, all keywords considered (None: it is)."""
        return self.validator(text)

    def reorder(self, value: Any) -> Any:
        """`value` with object keys in schema order, undeclared ones after the declared in their own order."""
        return self.key_order(value)
