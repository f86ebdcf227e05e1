"""xgrammar: EBNF and structural tags. Importing this file imports torch (xgrammar does); only route to it when needed.

Facts of 0.2.9 that this file rests on (tests/grammar/engines/test_xgrammar.py holds them down):
- `accept_token` returns False for an illegal token and changes nothing; rollback is unlimited.
- Filling a mask after the stop token raises, so stop ids are counted here and never shown to it.
- Its masks allow every split of a forced text; the mask is narrowed here to the canonical token, so that text with
  and without jump-forward is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import xgrammar

from sglite.errors import GrammarError, GrammarTooLarge, GrammarViolation, InvalidGrammar
from sglite.grammar import bitmask
from sglite.grammar.canonical import certain_tokens
from sglite.grammar.engines import productive
from sglite.grammar.matcher import Bitmask
from sglite.grammar.vocab import Vocab
from sglite.protocol import GrammarSpec

MAX_FORCED = 64  # tokens that one call of forced() looks ahead
MAX_COMPILED_BYTES = 64 << 20


class XGrammarMatcher:
    """See `sglite.grammar.matcher.Matcher`."""

    __slots__ = ("_num_stops", "_num_tokens", "_vocab", "native")

    def __init__(self, native: xgrammar.GrammarMatcher, vocab: Vocab) -> None:
        self.native = native
        self._vocab = vocab
        self._num_tokens = 0  # taken by native
        self._num_stops = 0  # stop ids accepted after them

    def accept(self, token_ids: Sequence[int]) -> int:
        done = 0
        for token_id in token_ids:
            if token_id in self._vocab.stop_ids:
                if not self.can_stop:
                    break
                self._num_stops += 1
            elif self._num_stops or not 0 <= token_id < self._vocab.size or not self.native.accept_token(token_id):
                break
            else:
                self._num_tokens += 1
            done += 1
        return done

    def rollback(self, num_tokens: int) -> None:
        assert 0 <= num_tokens <= self._num_tokens + self._num_stops, "rollback past the start"
        stops = min(num_tokens, self._num_stops)
        self._num_stops -= stops
        if num_tokens > stops:
            self.native.rollback(num_tokens - stops)
            self._num_tokens -= num_tokens - stops

    def fork(self) -> XGrammarMatcher:
        twin = XGrammarMatcher(self.native.fork(), self._vocab)
        twin._num_tokens, twin._num_stops = self._num_tokens, self._num_stops
        return twin

    def fill(self, row: Bitmask) -> None:
        if not self._num_stops:
            self.native.fill_next_token_bitmask(row.reshape(1, -1))
        self.finish_fill(row)

    def finish_fill(self, row: Bitmask) -> None:
        """What follows native's own fill of `row`, wherever that ran."""
        if self._num_stops:
            row[:] = self._vocab.stop_mask
            return
        certain = self._next_certain()
        if certain is not None:
            row[:] = bitmask.of((certain,), self._vocab.size)
        elif not row.any():
            raise GrammarViolation("the grammar allows no token of this model from here")

    def forced(self) -> list[int]:
        found: list[int] = []
        while len(found) < MAX_FORCED and (token_id := self._next_certain()) is not None:
            self.native.accept_token(token_id)
            found.append(token_id)
        if found:
            self.native.rollback(len(found))
        return found

    def _next_certain(self) -> int | None:
        if self._num_stops:
            return None
        text = self.native.find_jump_forward_string()
        tokens = certain_tokens(text, self._vocab) if text else []
        if not tokens or not self.native.accept_token(tokens[0]):
            return None
        self.native.rollback(1)
        return tokens[0]

    @property
    def can_stop(self) -> bool:
        return self._num_stops > 0 or self.native.is_completed()

    @property
    def finished(self) -> bool:
        if self._num_stops:
            return True
        if not self.native.is_completed():
            return False
        row = bitmask.empty(self._vocab.size)
        self.native.fill_next_token_bitmask(row.reshape(1, -1))
        return not (row & ~self._vocab.stop_mask).any()


@dataclass(frozen=True, slots=True)
class XGrammarGrammar:
    """What is shared by all completions under one constraint; immutable."""

    spec: GrammarSpec
    nbytes: int
    compiled: xgrammar.CompiledGrammar = field(repr=False)
    vocab: Vocab = field(repr=False)

    def matcher(self) -> XGrammarMatcher:
        stop_ids = list(self.vocab.stop_ids)
        return XGrammarMatcher(xgrammar.GrammarMatcher(self.compiled, override_stop_tokens=stop_ids), self.vocab)


class XGrammarEngine:
    def __init__(self, vocab: Vocab) -> None:
        self.vocab = vocab
        info = xgrammar.TokenizerInfo(list(vocab.tokens), vocab_size=vocab.size, stop_token_ids=list(vocab.stop_ids))
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, spec: GrammarSpec) -> XGrammarGrammar:
        """Raises InvalidGrammar or GrammarTooLarge. xgrammar's own exceptions are RuntimeErrors of many kinds."""
        try:
            if spec.kind == "ebnf":
                grammar = xgrammar.Grammar.from_ebnf(spec.source)
            else:
                grammar = xgrammar.Grammar.from_structural_tag(spec.source)
            productive.check(grammar.serialize_json())
            compiled = self._compiler.compile_grammar(grammar)
        except GrammarError:
            raise
        except (RuntimeError, ValueError, TypeError) as error:
            raise InvalidGrammar(f"the {spec.kind} cannot be used: {_reason(error)}", param=spec.kind) from error
        if compiled.memory_size_bytes > MAX_COMPILED_BYTES:
            raise GrammarTooLarge(f"the compiled {spec.kind} takes over {MAX_COMPILED_BYTES >> 20} MB")
        made = XGrammarGrammar(
            spec=spec,
            nbytes=compiled.memory_size_bytes + 4096,
            compiled=compiled,
            vocab=self.vocab,
        )
        _check_first_mask(made)
        return made


def _check_first_mask(grammar: XGrammarGrammar) -> None:
    try:
        grammar.matcher().fill(bitmask.empty(grammar.vocab.size))
    except GrammarViolation as error:
        raise InvalidGrammar("no text at all satisfies the constraint") from error


def _reason(error: Exception) -> str:
    """Without the C++ file and line that the message begins with."""
    return str(error).rsplit(": ", 1)[-1].strip()[:500] or type(error).__name__
