"""A short way from a matcher's position to a complete text, found on copies.

Greedy and not exhaustive: forced text is taken, a closing character goes before everything, and where several texts are
possible inside a string (the next key, an enum) each is followed to its end and the shortest wins. What it finds is
always complete; that nothing shorter exists is not proven.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

from sglite.grammar import bitmask
from sglite.grammar.matcher import Matcher
from sglite.grammar.vocab import Vocab

MAX_BYTES = 8_192  # of a way to the end
_MAX_ROLLOUTS = 16
_MAX_BRANCHES = 16
_ATTEMPTS = 6

_OUTSIDE = b'}],:0123456789"[{ntf-'  # what closes, then values by the length of the shortest one
_INSIDE = b'"a0A '


@dataclass(frozen=True, slots=True)
class JsonState:
    """Where in a JSON text: enough to tell a closing quote from an opening one, and how deep."""

    in_string: bool = False
    escaped: bool = False
    depth: int = 0

    def after(self, data: bytes) -> JsonState:
        in_string, escaped, depth = self.in_string, self.escaped, self.depth
        for byte in data:
            if in_string:
                if escaped:
                    escaped = False
                elif byte == 0x5C:  # backslash
                    escaped = True
                elif byte == 0x22:  # quote
                    in_string = False
            elif byte == 0x22:
                in_string = True
            elif byte in b"[{":
                depth += 1
            elif byte in b"]}":
                depth -= 1
        return JsonState(in_string, escaped, depth)


def closing_tokens(matcher: Matcher, vocab: Vocab, state: JsonState) -> list[int] | None:
    """Tokens that complete the text, stop id not counted; None where none were found. The matcher does not move."""
    found: bytes | None = None
    for attempt in range(_ATTEMPTS):
        walk = _Walk(matcher.fork(), vocab, state, order=random.Random(attempt) if attempt else None)
        text = walk.to_the_end()
        if text is not None and (found is None or len(text) < len(found)):
            found = text
        if found is not None and not attempt:
            break
    return None if found is None else _fewest_tokens(found, matcher, vocab)


class _Walk:
    """One way to the end. `order` None: by preference; else what is not a closing character comes in random order."""

    def __init__(self, matcher: Matcher, vocab: Vocab, state: JsonState, *, order: random.Random | None) -> None:
        self._matcher = matcher
        self._vocab = vocab
        self._state = state
        self._order = order
        self._text = b""
        self._rollouts = 0
        self._row = bitmask.empty(vocab.size)

    def to_the_end(self, *, branching: bool = True) -> bytes | None:
        while not self._matcher.can_stop:
            if len(self._text) > MAX_BYTES:
                return None
            forced = self._matcher.forced()
            if forced:
                self._take(forced)
                continue
            options = self._options()
            if not options:
                return None
            best = options[0]
            if branching and self._at_a_choice_of_texts(options):
                best = self._best(options)
            self._take([best])
        return self._text

    def _take(self, token_ids: Sequence[int]) -> None:
        taken = self._matcher.accept(token_ids)
        data = self._vocab.bytes_of(token_ids[:taken])
        self._text += data
        self._state = self._state.after(data)

    def _options(self) -> list[int]:
        """Legal tokens to go on with, the preferred one first: single bytes where there are any."""
        self._matcher.fill(self._row)
        tokens = self._vocab.tokens
        single = self._vocab.byte_ids
        legal = single[(self._row[single >> 5] >> (single & 31)) & 1 == 1].tolist()
        if not legal:
            legal = sorted((i for i in bitmask.ids(self._row).tolist() if tokens[i]), key=lambda i: len(tokens[i]))
        preferred = _INSIDE if self._state.in_string else _OUTSIDE
        if self._order is None:
            rank = {byte: n for n, byte in enumerate(preferred)}
        else:
            self._order.shuffle(legal)
            rank = {preferred[0]: 0}
        return sorted(legal, key=lambda i: rank.get(tokens[i][0], len(preferred)))

    def _at_a_choice_of_texts(self, options: Sequence[int]) -> bool:
        closes = any(self._vocab.tokens[i] == b'"' for i in options)
        return 1 < len(options) <= _MAX_BRANCHES and not closes and self._rollouts < _MAX_ROLLOUTS

    def _best(self, options: Sequence[int]) -> int:
        lengths: list[tuple[int, int]] = []
        for n, option in enumerate(options):
            self._rollouts += 1
            branch = _Walk(self._matcher.fork(), self._vocab, self._state, order=self._order)
            branch._take([option])
            text = branch.to_the_end(branching=False)
            lengths.append((MAX_BYTES if text is None else len(text), n))
        return options[min(lengths)[1]]


def _fewest_tokens(text: bytes, matcher: Matcher, vocab: Vocab) -> list[int] | None:
    """The text in canonical tokens or in longest-first ones, whichever are fewer and legal."""
    ways = [vocab.spell(text)]
    with contextlib.suppress(UnicodeDecodeError):  # the position may be within a character
        ways.append(vocab.encode(text.decode()))
    for tokens in sorted((way for way in ways if way is not None), key=len):
        if completes(matcher, tokens):
            return tokens
    return None


def completes(matcher: Matcher, token_ids: Sequence[int]) -> bool:
    """Whether the tokens lead to a complete text. The matcher is where it was afterwards."""
    taken = matcher.accept(token_ids)
    complete = taken == len(token_ids) and matcher.can_stop
    matcher.rollback(taken)
    return complete
