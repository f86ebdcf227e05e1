"""From a schema's text to a PreparedSchema."""

from __future__ import annotations

from typing import Any

from sglite.errors import GrammarTooLarge, SgliteError, UnsupportedSchema
from sglite.grammar.residual.rules import ResidualRules
from sglite.grammar.schema.cases import Gap
from sglite.grammar.schema.coverage import report
from sglite.grammar.schema.document import Document
from sglite.grammar.schema.emit import Emitter
from sglite.grammar.schema.evaluate import Evaluator
from sglite.grammar.schema.expand import Expander, IllFounded, TooManyCases, TooMuchWork
from sglite.grammar.schema.grammar import Grammar
from sglite.grammar.schema.numerals import NeedsDigits
from sglite.grammar.schema.order import KeyOrder
from sglite.grammar.schema.pattern import PatternError
from sglite.grammar.schema.shapes import Conflict
from sglite.grammar.schema.types import PreparedSchema, SchemaLimits
from sglite.grammar.schema.values import parse_json, parse_schema_text
from sglite.protocol import OnUnsupported, Whitespace

MAX_ATTEMPTS = 40  # each leaves one more keyword to validation


def prepare(
    source: str,
    *,
    on_unsupported: OnUnsupported = "error",
    whitespace: Whitespace = "compact",
    limits: SchemaLimits | None = None,
) -> PreparedSchema:
    """A schema's JSON text as a grammar.

    Raises InvalidGrammar (not a schema), UnsupportedSchema (on_unsupported="error" and a keyword that cannot be
    enforced, with its pointer; or no value satisfies the schema) or GrammarTooLarge.
    """
    limits = limits or SchemaLimits()
    document = Document(parse_schema_text(source, limits))
    builder = _Builder(document, limits, whitespace, strict=on_unsupported == "error")
    lark = builder.build()
    return PreparedSchema(
        lark=lark,
        coverage=report(document, builder.expander.terms, list(builder.gaps.values())),
        key_order=KeyOrder(builder.expander).reorder,
        validator=_Validator(document),
        residual=builder.residual,
    )


class _Builder:
    def __init__(self, document: Document, limits: SchemaLimits, whitespace: Whitespace, *, strict: bool) -> None:
        self.document = document
        self.limits = limits
        self.whitespace: Whitespace = whitespace
        self.strict = strict
        self.expander = self._new_expander()
        self.gaps: dict[tuple[str, str], Gap] = {}
        self.residual: ResidualRules | None = None  # known once built
        self.not_followed: set[str] = set()  # pointers of keywords whose place turned out ambiguous
        self.by_digits = False

    def _new_expander(self, *, coarse: bool = False) -> Expander:
        limits = self.limits
        return Expander(self.document, max_cases=limits.max_branches, max_steps=limits.max_steps, coarse=coarse)

    def build(self) -> str:
        """Raises what `prepare` does."""
        try:
            return self._build()
        except (TooMuchWork, GrammarTooLarge) as error:
            if self.strict:
                reason = f"normalising the schema takes more than {self.limits.max_steps} steps"
                raise error if isinstance(error, GrammarTooLarge) else GrammarTooLarge(reason) from None
        self.expander = self._new_expander(coarse=True)
        try:
            lark = self._build()
        except TooMuchWork:
            reason = f"normalising the schema takes more than {self.limits.max_steps} steps, even without oneOf and not"
            raise GrammarTooLarge(reason) from None
        for (node_id, keyword), pointer in self.expander.terms.coarsened.items():
            self._on_gap(Gap(0, node_id, pointer, keyword, "the schema is too entangled to enforce it exactly"))
        return lark

    def _build(self) -> str:
        for _ in range(MAX_ATTEMPTS):
            try:
                return self._attempt()
            except TooManyCases as error:
                choice = error.choice
                reason = f"its branches combine into more than {self.limits.max_branches} cases"
                self._on_gap(Gap(0, choice.node_id, f"{choice.pointer}/{choice.keyword}", choice.keyword, reason))
                self.expander.loosen(choice.node_id, choice.keyword)
        raise GrammarTooLarge(f"more than {MAX_ATTEMPTS} keywords of the schema have too many cases")

    def _attempt(self) -> str:
        grammar = Grammar(max_rules=self.limits.max_rules)
        emitter = Emitter(
            self.expander,
            grammar,
            whitespace=self.whitespace,
            on_gap=self._on_gap,
            not_followed=self.not_followed,
            by_digits=self.by_digits,
        )
        try:
            lark = grammar.lark(emitter.emit((self.document.root,)))
        except NeedsDigits:
            self.by_digits = True
            return self._attempt()
        except IllFounded as error:
            pointer = self.document.node(error.node_id).pointer
            raise UnsupportedSchema(
                "it refers to itself without a value between", pointer=pointer, keyword="$ref"
            ) from None
        if lark is None:
            raise UnsupportedSchema("no value satisfies the schema", pointer="", keyword=self._first_keyword())
        try:
            self.residual = emitter.residual
        except Conflict as conflict:
            self._on_gap(conflict.gap)
            self.not_followed.add(conflict.gap.pointer)
            return self._attempt()
        return lark

    def _first_keyword(self) -> str:
        value = self.document.node(self.document.root).value
        return "false" if isinstance(value, bool) else next(iter(value), "false")

    def _on_gap(self, gap: Gap) -> None:
        if self.strict:
            raise UnsupportedSchema(gap.reason, pointer=gap.pointer, keyword=gap.keyword)
        self.gaps[gap.pointer, gap.keyword] = gap


class _Validator:
    def __init__(self, document: Document) -> None:
        self.document = document

    def __call__(self, text: str) -> str | None:
        try:
            value: Any = parse_json(text)
        except SgliteError as error:
            return error.message
        try:
            return Evaluator(self.document).error(self.document.root, value)
        except PatternError as error:
            return f"a pattern cannot be checked: {error}"
