"""Which engine carries a constraint, and why.

llguidance carries what it is exact for: JSON schema as normalised by our front end, JSON object, regex, choice, Lark.
xgrammar carries EBNF (its dialect) and structural tags that Lark cannot express and that hold no schema. Neither ever
stands in for the other in silence.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import llguidance

from sglite.errors import InvalidGrammar
from sglite.grammar import tools
from sglite.grammar.engines.forcing import unforced
from sglite.grammar.engines.fuse import fuse_delimiters
from sglite.grammar.engines.tags import NotTranslated, holds_schema, tags_to_lark
from sglite.grammar.reach import Reach, lark_reach, regex_reach
from sglite.grammar.residual.rules import ResidualRules
from sglite.grammar.schema import prepare
from sglite.grammar.schema.types import SchemaLimits
from sglite.protocol import Coverage, GrammarSpec

EngineName = Literal["llguidance", "xgrammar"]

_DEFAULT_LIMITS = SchemaLimits()

_LONG_GRAMMAR = 65_536  # characters
_OFTEN = 256
_COUNTS = re.compile(r"(?<!\\x)\{(\d+)(?:,(\d*))?\}")


@dataclass(frozen=True, slots=True)
class Plan:
    """How one spec is to be enforced; nothing has been compiled yet."""

    engine: EngineName
    grammar: str = field(repr=False)  # llguidance: its serialised grammar; xgrammar: EBNF or structural tag text
    coverage: Coverage
    validate: Callable[[str], str | None] = field(repr=False)
    residual: ResidualRules | None = None  # what its matchers keep besides

    @staticmethod
    def exact(grammar: str, coverage: Coverage, residual: ResidualRules | None = None) -> Plan:
        """A plan for llguidance that leaves nothing to check of a complete text."""
        return Plan("llguidance", grammar, coverage, _nothing_left, residual)


def plan(spec: GrammarSpec, *, limits: SchemaLimits = _DEFAULT_LIMITS) -> Plan:
    """Raises the GrammarError that refuses the spec, if one does."""
    if spec.kind in ("json_schema", "json_object"):
        source = spec.source if spec.kind == "json_schema" else '{"type":"object"}'
        prepared = prepare(source, on_unsupported=spec.on_unsupported, whitespace=spec.whitespace, limits=limits)
        coverage = Coverage(
            items=prepared.coverage.items,
            engine="llguidance",
            reason=prepared.coverage.reason,
        )
        return Plan(
            engine="llguidance",
            grammar=llguidance.LLMatcher.grammar_from_lark(fuse_delimiters(prepared.lark)),
            coverage=coverage,
            validate=prepared.validate,
            residual=prepared.residual,
        )
    if spec.kind == "tools":
        lark, coverage, residual = tools.lark_of(spec, limits=limits)
        return Plan.exact(llguidance.LLMatcher.grammar_from_lark(lark), coverage, residual)
    if spec.kind == "structural_tag":
        return _structural_tag(spec)
    grammar, engine, reason = _SIMPLE[spec.kind](spec)
    return Plan(engine=engine, grammar=grammar, coverage=Coverage(engine=engine, reason=reason), validate=_nothing_left)


def is_tame(grammar: str) -> bool:
    """The engine compiles it in time about linear in its length: nothing in it is repeated often."""
    if len(grammar) > _LONG_GRAMMAR or "%json" in grammar:
        return False
    for line in grammar.splitlines():
        product = math.prod(max(int(least), int(most or 0), 1) for least, most in _COUNTS.findall(line))
        if product > _OFTEN:
            return False
    return True


def reach_of(spec: GrammarSpec, grammar: str) -> Reach | None:
    """What closing in time needs to know; None for the kinds that cannot be closed."""
    match spec.kind:
        case "json_schema":
            return lark_reach(grammar)
        case "json_object":
            return Reach(opening=8, inside=4)  # {"":0} or less
        case "regex":
            return regex_reach(spec.source)
        case "choice":
            longest = max(len(text.encode()) for text in json.loads(spec.source))
            return Reach(opening=longest, inside=longest)
        case _:
            return None


def _nothing_left(text: str) -> str | None:
    return None


def _regex(spec: GrammarSpec) -> tuple[str, EngineName, str]:
    return llguidance.LLMatcher.grammar_from_regex(spec.source), "llguidance", "derivatives, no automaton built ahead"


def _choice(spec: GrammarSpec) -> tuple[str, EngineName, str]:
    """As an alternation of literals: 60 times faster masks than Lark alternatives at 10,000 choices."""
    pattern = "|".join("".join(map(_literal, text)) for text in json.loads(spec.source))
    return llguidance.LLMatcher.grammar_from_regex(pattern), "llguidance", "finite: an alternation of literals"


def _literal(char: str) -> str:
    return char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}"


def _lark(spec: GrammarSpec) -> tuple[str, EngineName, str]:
    return llguidance.LLMatcher.grammar_from_lark(unforced(spec.source)), "llguidance", "its dialect of Lark"


def _ebnf(spec: GrammarSpec) -> tuple[str, EngineName, str]:
    return spec.source, "xgrammar", "its dialect of EBNF"


def _structural_tag(spec: GrammarSpec) -> Plan:
    """As Lark where every part has a counterpart there. What has none goes to xgrammar, unless a schema is among it:
    xgrammar drops keywords in silence."""
    try:
        grammar, items, residual = tags_to_lark(spec)
    except NotTranslated as error:
        if holds_schema(json.loads(spec.source)):
            raise InvalidGrammar(
                f"the structural tag cannot be enforced exactly: {error.what} beside a JSON schema is not supported",
                param="structural_tag",
            ) from error
        reason = f"its structural tags; Lark has no {error.what}"
        return Plan("xgrammar", spec.source, Coverage(engine="xgrammar", reason=reason), _nothing_left)
    reason = "structural tags as Lark, schemas exact within"
    return Plan.exact(grammar, Coverage(items, "llguidance", reason), residual)


_SIMPLE: dict[str, Callable[[GrammarSpec], tuple[str, EngineName, str]]] = {
    "regex": _regex,
    "choice": _choice,
    "lark": _lark,
    "ebnf": _ebnf,
}
