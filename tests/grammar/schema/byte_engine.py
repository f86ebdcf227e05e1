"""A prepared schema's matcher over single bytes: whether it accepts a whole text."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from llguidance import LLMatcher

from sglite.errors import GrammarError
from sglite.grammar import bitmask, spec
from sglite.grammar.engines.fuse import fuse_delimiters
from sglite.grammar.engines.llguidance import LLGuidanceEngine
from sglite.grammar.matcher import Matcher
from sglite.grammar.residual.matcher import WithResidual
from sglite.grammar.residual.tracker import Tracker
from sglite.grammar.schema import PreparedSchema
from sglite.grammar.schema.values import string_text
from sglite.grammar.vocab import Vocab

_VOCAB = Vocab.of_bytes()
_ENGINE = LLGuidanceEngine(_VOCAB, follow=False)


class ByteEngine:
    """Raises ValueError where llguidance refuses the grammar."""

    def __init__(self, prepared: PreparedSchema) -> None:
        self.prepared = prepared
        try:
            grammar = LLMatcher.grammar_from_lark(fuse_delimiters(prepared.lark))
            self._grammar = _ENGINE.compile(spec.json_schema("{}"), grammar)
        except GrammarError as error:
            raise ValueError(str(error)) from error
        self._row = bitmask.empty(_VOCAB.size)

    def accepts_text(self, text: str) -> bool:
        """As in decoding: a mask before each byte, which has to say the same as accept."""
        matcher: Matcher = self._grammar.exact_matcher()
        if self.prepared.residual is not None:
            matcher = WithResidual(matcher, Tracker(self.prepared.residual), _VOCAB)
        for at, byte in enumerate(text.encode()):
            matcher.fill(self._row)
            taken = matcher.accept((byte,)) == 1
            assert taken == bitmask.contains(self._row, byte), (text, at)
            if not taken:
                return False
        return matcher.can_stop

    def bytes_after(self, text: str) -> list[int]:
        """The bytes that may follow a text that may begin a value."""
        matcher: Matcher = self._grammar.exact_matcher()
        if self.prepared.residual is not None:
            matcher = WithResidual(matcher, Tracker(self.prepared.residual), _VOCAB)
        data = list(text.encode())
        assert matcher.accept(data) == len(data)
        matcher.fill(self._row)
        return [i for i in bitmask.ids(self._row).tolist() if i not in _VOCAB.stop_ids]

    def accepts(self, value: Any) -> bool:
        """The value in compact spelling, its keys put into schema order."""
        return self.accepts_text(compact(self.prepared.reorder(value)))


def compact(value: Any) -> str:
    """JSON without blanks; a Decimal keeps its own text."""
    if isinstance(value, Decimal):
        return str(value).replace("E", "e")
    if isinstance(value, dict):
        return "{" + ",".join(f"{string_text(k)}:{compact(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(compact(item) for item in value) + "]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return string_text(value) if isinstance(value, str) else str(value)
