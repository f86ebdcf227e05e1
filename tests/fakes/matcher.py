"""Grammars small enough to see: a finite set of texts over byte tokens, and a service that compiles them on demand."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from sglite.errors import GrammarViolation
from sglite.grammar.matcher import OVER, REFUSED, Bitmask, Matcher, SharedMask
from sglite.protocol import Coverage, CoverageItem, GrammarSpec
from tests.fakes.tokenizer import ByteTokenizer

STOP_IDS = ByteTokenizer.stop_token_ids


class TextsMatcher:
    """One of the given byte strings, then a stop id."""

    def __init__(self, texts: Sequence[bytes], taken: Sequence[int] = ()) -> None:
        self._texts = [tuple(t) for t in texts]
        self._taken = list(taken)

    def accept(self, token_ids: Sequence[int]) -> int:
        for done, token_id in enumerate(token_ids):
            if token_id not in self.allowed():
                return done
            self._taken.append(token_id)
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        del self._taken[len(self._taken) - num_tokens :]

    def fork(self) -> TextsMatcher:
        twin = TextsMatcher((), self._taken)
        twin._texts = self._texts
        return twin

    def fill(self, row: Bitmask) -> None:
        allowed = self.allowed()
        if not allowed:
            raise GrammarViolation("nothing may follow")
        row.fill(0)
        for token_id in allowed:
            row.view(np.uint32)[token_id >> 5] |= np.uint32(1 << (token_id & 31))

    def forced(self) -> list[int]:
        taken, run = list(self._taken), []
        while len(allowed := self._follow(taken)) == 1 and not allowed & set(STOP_IDS):
            run.append(allowed.pop())
            taken.append(run[-1])
        return run

    @property
    def can_stop(self) -> bool:
        return tuple(self._taken) in self._texts

    @property
    def finished(self) -> bool:
        return bool(self._taken and self._taken[-1] in STOP_IDS) or self.allowed() == set(STOP_IDS)

    def allowed(self) -> set[int]:
        return self._follow(self._taken)

    def _follow(self, taken: Sequence[int]) -> set[int]:
        at, n = tuple(taken), len(taken)
        following = {text[n] for text in self._texts if text[:n] == at and len(text) > n}
        return following | set(STOP_IDS) if at in self._texts else following


class PrefixedMatcher:
    """Continues the bytes of a cut token, then follows `inner` (None: anything)."""

    def __init__(self, prefix: bytes, inner: Matcher | None, done: int = 0) -> None:
        self._prefix, self._inner, self._done = prefix, inner, done

    def accept(self, token_ids: Sequence[int]) -> int:
        for i, token_id in enumerate(token_ids):
            if self._done < len(self._prefix):
                if token_id != self._prefix[self._done]:
                    return i
            elif self._inner is not None and not self._inner.accept([token_id]):
                return i
            self._done += 1
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        for _ in range(num_tokens):
            self._done -= 1
            if self._done >= len(self._prefix) and self._inner is not None:
                self._inner.rollback(1)

    def fork(self) -> PrefixedMatcher:
        return PrefixedMatcher(self._prefix, self._inner and self._inner.fork(), self._done)

    def fill(self, row: Bitmask) -> None:
        if self._done < len(self._prefix):
            row.fill(0)
            token_id = self._prefix[self._done]
            row.view(np.uint32)[token_id >> 5] |= np.uint32(1 << (token_id & 31))
        elif self._inner is None:
            row.fill(-1)
        else:
            self._inner.fill(row)

    def forced(self) -> list[int]:
        return list(self._prefix[self._done :]) or ([] if self._inner is None else self._inner.forced())

    @property
    def can_stop(self) -> bool:
        return self._done >= len(self._prefix) and (self._inner is None or self._inner.can_stop)

    @property
    def finished(self) -> bool:
        return self._inner is not None and self._done >= len(self._prefix) and self._inner.finished


@dataclass(eq=False)
class TextsGrammar:
    spec: GrammarSpec
    texts: list[bytes]
    coverage: Coverage = field(default_factory=Coverage)
    complaint: str | None = None
    nbytes: int = 1
    make: Callable[[list[bytes]], Matcher] = TextsMatcher

    def matcher(self) -> Matcher:
        return self.make(self.texts)

    def validate(self, text: str) -> str | None:
        return self.complaint


class LoopFiller:
    """One row after the other; a row that fails leaves the others alone."""

    def __init__(self) -> None:
        self.fills = 0

    def fill(self, matchers: Sequence[Matcher], rows: Sequence[int], bitmask: Bitmask) -> dict[int, Exception]:
        failures: dict[int, Exception] = {}
        for i, (matcher, row) in enumerate(zip(matchers, rows, strict=True)):
            self.fills += 1
            try:
                matcher.fill(bitmask[row])
            except GrammarViolation as error:
                failures[i] = error
        return failures


class BatchLoopFiller(LoopFiller):
    """Accepts many tokens at a time too."""

    def __init__(self) -> None:
        super().__init__()
        self.advances = 0

    def advance(self, matchers: Sequence[Matcher], token_ids: Sequence[int]) -> list[int]:
        self.advances += 1
        return [self._advance(m, t) for m, t in zip(matchers, token_ids, strict=True)]

    @staticmethod
    def _advance(matcher: Matcher, token_id: int) -> int:
        if not matcher.accept((token_id,)):
            return REFUSED
        return OVER if matcher.finished else len(matcher.forced())


class SharingFiller(BatchLoopFiller):
    """Masks of texts that allow the same are one, made once."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: dict[frozenset[int], SharedMask] = {}

    def known(self, matchers: Sequence[Matcher]) -> list[SharedMask | None]:
        return [self.masks.get(frozenset(m.allowed())) if isinstance(m, TextsMatcher) else None for m in matchers]

    def shared(self, matchers: Sequence[Matcher]) -> tuple[list[SharedMask | None], dict[int, Exception]]:
        found: list[SharedMask | None] = []
        failures: dict[int, Exception] = {}
        for i, matcher in enumerate(matchers):
            allowed = frozenset(matcher.allowed()) if isinstance(matcher, TextsMatcher) else None
            if allowed is not None and allowed not in self.masks:
                row = np.zeros(-(-ByteTokenizer.vocab_size // 32), np.int32)
                try:
                    matcher.fill(row)
                except GrammarViolation as error:
                    failures[i], allowed = error, None
                else:
                    self.masks[allowed] = SharedMask(row)
            found.append(None if allowed is None else self.masks[allowed])
        return found, failures


class FakeGrammars:
    """Compiles "choice" specs. `hold` keeps the next compiles until `release`; `error` makes them fail."""

    def __init__(self, filler: LoopFiller | None = None) -> None:
        self.filler = filler or LoopFiller()
        self.hold = False
        self.error: Exception | None = None
        self.complaint: str | None = None
        self.make: Callable[[list[bytes]], Matcher] = TextsMatcher
        self._waiting: list[tuple[Future[TextsGrammar], GrammarSpec]] = []

    def compile(self, spec: GrammarSpec) -> Future[TextsGrammar]:
        future: Future[TextsGrammar] = Future()
        if self.hold:
            self._waiting.append((future, spec))
        else:
            self._resolve(future, spec)
        return future

    def release(self) -> None:
        self.hold = False
        waiting, self._waiting = self._waiting, []
        for future, spec in waiting:
            self._resolve(future, spec)

    def heal(self, token_id: int, inner: Matcher | None) -> Matcher | None:
        return PrefixedMatcher(bytes([token_id]), inner) if token_id < 256 else None

    def _resolve(self, future: Future[TextsGrammar], spec: GrammarSpec) -> None:
        if self.error is not None:
            future.set_exception(self.error)
            return
        coverage = Coverage()
        if self.complaint is not None:
            coverage = Coverage((CoverageItem("/minLength", "minLength", "validated"),))
        texts = [text.encode() for text in json.loads(spec.source)]
        future.set_result(TextsGrammar(spec, texts, coverage, self.complaint, make=self.make))


def choice(*texts: str) -> GrammarSpec:
    return GrammarSpec(kind="choice", source=json.dumps(texts))
