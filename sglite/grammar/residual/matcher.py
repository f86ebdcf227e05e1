"""A matcher whose tokens must also keep the rules of a `Tracker`.

What each token does to the tracker is known when it is accepted; a mask then loses

    in a key or item that began like an earlier one     the tokens that would end it as that one
    anywhere                                            the few tokens that hold a whole key, or the end of an item and
                                                        more, where trying them shows that they break a rule
    in a number that has a rule                         the tokens after which no number of the rule begins so, or that
                                                        end it as another one

Where keys or items can run out, a part that ended may leave some beginnings without a new way to go on. They are found
then, by walking back from its end for as long as every next byte is such a beginning, and are forbidden like the part
itself: what the mask allows can always be completed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from sglite.errors import GrammarViolation
from sglite.grammar import bitmask
from sglite.grammar.matcher import Bitmask, Matcher
from sglite.grammar.residual.rules import ResidualRules
from sglite.grammar.residual.tracker import AROUND, KEY, OUTSIDE, SCALAR, STRING, Frame, State, Tracker
from sglite.grammar.vocab import INERT_IN_STRING, INERT_OUTSIDE, TokenSet, Vocab

_NOTHING_LEFT = "every token that the grammar allows here breaks another rule of the schema"
_PIECE = re.compile(rb'[^"\[\]{},]+|.', re.DOTALL)


def warm_tables(rules: ResidualRules, vocab: Vocab) -> None:
    """Make what masks under these rules need of the vocabulary (0.1 to 0.5 s once), and not within a step."""
    tracker = Tracker(rules)
    if tracker.follows_numbers:
        _ = vocab.numeric_outside, vocab.numeric_in_string
    elif tracker.follows_values:
        _ = vocab.closers_outside, vocab.closers_in_string
    if rules.around is not None:
        _ = vocab.repeated_keys, vocab.no_tokens


class WithResidual:
    """See `sglite.grammar.matcher.Matcher`. A layer for the batch filler."""

    __slots__ = (
        "_ends",
        "_inert_in_string",
        "_inert_outside",
        "_runs_out",
        "_states",
        "_text",
        "_tracker",
        "_vocab",
        "below",
    )

    def __init__(self, below: Matcher, tracker: Tracker, vocab: Vocab) -> None:
        self.below: Matcher = below
        self._tracker = tracker
        self._vocab = vocab
        self._runs_out = tracker.runs_out
        self._inert_outside = 0 if tracker.follows_values else INERT_OUTSIDE
        self._inert_in_string = 0 if tracker.runs_out else INERT_IN_STRING
        self._text = bytearray()
        self._ends = [0]  # length of the text after each accepted token
        self._states = [tracker.start()]  # at each of these

    def accept(self, token_ids: Sequence[int]) -> int:
        for done, token_id in enumerate(token_ids):
            if token_id in self._vocab.stop_ids and not self._may_end:
                return done
            if self.below.accept((token_id,)) == 0:
                return done
            if not self._follow(token_id):
                self.below.rollback(1)
                return done
        return len(token_ids)

    def _follow(self, token_id: int) -> bool:
        """Go along with a token that `below` has taken. False where it breaks a rule."""
        state = self._states[-1]
        data = self._vocab.tokens[token_id]  # b"" for a stop id
        inert = self._inert_in_string if 0 < state.mode < SCALAR else self._inert_outside
        if state.mode == AROUND or state.escaped or not self._vocab.inertness[token_id] & inert:
            after = self._after(data)
            if after is None:
                return False
            state = after
        self._text += data
        self._ends.append(len(self._text))
        self._states.append(state)
        return True

    def rollback(self, num_tokens: int) -> None:
        assert 0 <= num_tokens < len(self._ends), "rollback past the start"
        if num_tokens == 0:
            return
        self.below.rollback(num_tokens)
        self._forget(num_tokens)

    def fork(self) -> WithResidual:
        twin = WithResidual(self.below.fork(), self._tracker, self._vocab)
        twin._text, twin._ends, twin._states = self._text.copy(), self._ends.copy(), self._states.copy()
        return twin

    def fill(self, row: Bitmask) -> None:
        self.below.fill(row)
        self.finish_fill(row)

    def finish_fill(self, row: Bitmask) -> None:
        state = self._states[-1]
        if self._runs_out:
            self._finish_fill_where_parts_run_out(row)
            return
        wrong = self._repeating(state) if state.frame.seen.size and state.in_string else []
        suspects = self._suspects(state)
        if suspects:
            tokens = self._vocab.tokens
            wrong += [i for i in suspects.in_row(row) if self._tracker.step(state, self._text, tokens[i]) is None]
        if not self._may_end:
            wrong += self._vocab.stop_ids
        if wrong:
            bitmask.clear(row, wrong)
            if not row.any():
                raise GrammarViolation(_NOTHING_LEFT)

    @property
    def _may_end(self) -> bool:
        """No rule is against an end of the text here."""
        state = self._states[-1]
        ends_number = self._tracker.follows_numbers and state.mode == SCALAR and state.frame.parent is None
        return not ends_number or self._tracker.end_scalar(state, self._text) is not None

    @property
    def is_transparent(self) -> bool:
        """The mask here is that of `below`, whatever that is."""
        state = self._states[-1]
        return not (self._runs_out or (state.mode == KEY and state.frame.seen.size) or self._suspects(state))

    def forced(self) -> list[int]:
        tokens = self.below.forced()
        if not tokens:
            return tokens
        if self._runs_out:
            return tokens[: self.fork().accept(tokens)]
        state, text = self._states[-1], self._text.copy()
        for i, token_id in enumerate(tokens):
            step = self._tracker.step(state, text, self._vocab.tokens[token_id])
            if step is None:
                return tokens[:i]
            state = step.state
            text += self._vocab.tokens[token_id]
        return tokens

    @property
    def can_stop(self) -> bool:
        return self.below.can_stop and self._may_end

    @property
    def finished(self) -> bool:
        return self.below.finished

    def _forget(self, num_tokens: int) -> None:
        del self._ends[-num_tokens:]
        del self._states[-num_tokens:]
        del self._text[self._ends[-1] :]

    def _after(self, data: bytes) -> State | None:
        """The state after a token that `below` has taken already; None where it breaks a rule."""
        if self._runs_out:
            return self._after_pieces(data)
        step = self._tracker.step(self._states[-1], self._text, data)
        return None if step is None else step.state

    # --- masks

    def _repeating(self, state: State) -> list[int]:
        """Tokens that end the key or string at hand as an earlier one."""
        frame = state.frame
        in_item = state.mode == STRING and frame.shape.unique and not frame.is_object
        if state.mode != KEY and not in_item:
            return []
        found: list[int] = []
        begun = bytes(self._text[frame.begin :])
        quote = b'"' if state.mode == KEY else b""
        for text in frame.seen.texts():
            if text.startswith(begun) and (text[len(begun) :] + quote)[:-1] in self._vocab.before_quotes:
                found += self._vocab.extending(text[len(begun) :] + quote).tolist()
        return found

    def _suspects(self, state: State) -> TokenSet:
        """The tokens that can break a rule somewhere within, if any can."""
        vocab = self._vocab
        if state.mode == AROUND:
            if not self._tracker.is_near_value(state, self._text):
                return vocab.no_tokens
            if not self._tracker.follows_values:
                return vocab.repeated_keys
        if self._tracker.follows_numbers:
            return vocab.numeric_in_string if state.in_string else vocab.numeric_outside
        if self._tracker.follows_values:
            return vocab.closers_in_string if state.in_string else vocab.closers_outside
        if state.in_string:
            return vocab.later_keys_in_string
        return vocab.whole_keys if state.frame.due and state.frame.is_object else vocab.later_keys_outside

    # --- where parts run out

    def _finish_fill_where_parts_run_out(self, row: Bitmask) -> None:
        """A token that ends a value and takes a comma, too, is left out where that needs a closer look; the tokens
        for the two say the same. Where nothing else is legal, it is looked at."""
        behind = self._behind_value()
        state = self._states[-1]
        wrong = [*self._repeating(state), *self._dead(state.frame), *(() if self._may_end else self._vocab.stop_ids)]
        unclear: list[int] = []
        for token_id in self._suspects(state).in_row(row):
            token = self._vocab.tokens[token_id]
            start = behind if behind is not None and token[:1] in (b",", b"]", b"}") else state
            step = self._tracker.step(start, self._text, token)
            if step is None:
                wrong.append(token_id)
            elif step.went_on:
                unclear.append(token_id)
        bitmask.clear(row, wrong)
        if unclear:
            before = row.copy()
            bitmask.clear(row, unclear)
            if not row.any():
                row[:] = before
                bitmask.clear(row, [i for i in unclear if not self.fork().accept((i,))])
        if not row.any():
            raise GrammarViolation(_NOTHING_LEFT)

    def _dead(self, innermost: Frame) -> Iterator[int]:
        """Tokens that begin what has no new way to go on."""
        extending = self._vocab.extending
        frame: Frame | None = innermost
        while frame is not None:
            if frame.dead and frame.due:
                quote = b'"' if frame.is_object else b""
                for beginning in frame.dead:
                    yield from extending(quote + beginning).tolist()
                    yield from extending(b" " + quote + beginning).tolist()
            elif frame.dead and frame.begin >= 0:
                begun = bytes(self._text[frame.begin :])
                for beginning in frame.dead:
                    if beginning.startswith(begun):
                        yield from extending(beginning[len(begun) :]).tolist()
            frame = frame.parent

    def _behind_value(self) -> State | None:
        """The state that a comma would find here, told what it has to know. None where that cannot be said yet."""
        state = self._states[-1]
        behind = None if state.in_string else self._tracker.end_scalar(state, self._text)
        if behind is None or behind.frame.pending is None:
            return behind
        source = _Source(self.below.fork(), len(self._text), self._vocab)
        dead = _dead_beginnings(behind.frame, bytes(self._text), source)
        if dead is None:
            return None
        behind = _with_dead(behind, dead)
        if state.mode == OUTSIDE:
            self._states[-1] = behind
        return behind

    def _after_pieces(self, data: bytes) -> State | None:
        state, text = self._states[-1], bytes(self._text)
        source: _Source | None = None
        for piece in _PIECE.findall(data):
            if piece == b"," and not state.in_string:
                ended = self._tracker.end_scalar(state, text)
                if ended is None:
                    return None
                state = ended
                if state.frame.pending is not None:
                    source = source or self._source_before_last(len(self._text))
                    dead = _dead_beginnings(state.frame, text, source)
                    state = state if dead is None else _with_dead(state, dead)
            step = self._tracker.step(state, text, piece)
            if step is None:
                return None
            state = step.state
            text += piece
        return state

    def _source_before_last(self, length: int) -> _Source:
        """`below` is one token ahead of this."""
        below = self.below.fork()
        below.rollback(1)
        return _Source(below, length, self._vocab)


def _with_dead(state: State, dead: tuple[bytes, ...]) -> State:
    return State(state.frame.resolved(dead), state.mode, state.escaped)


class _Source:
    """What the grammar alone allows after texts that go on from a place."""

    def __init__(self, below: Matcher, length: int, vocab: Vocab) -> None:
        self._below = below
        self._length = length
        self._vocab = vocab
        self._row = bitmask.empty(vocab.size)

    def bytes_after(self, text: bytes) -> list[bytes] | None:
        """None where the text itself is not allowed."""
        rest = self._vocab.spell(text[self._length :])
        matcher = self._below.fork()
        if rest is None or matcher.accept(rest) < len(rest):
            return None
        matcher.fill(self._row)
        return self._vocab.first_bytes(self._row)


def _dead_beginnings(frame: Frame, text: bytes, source: _Source) -> tuple[bytes, ...] | None:
    """`frame.dead`, with what its pending part adds. None where no comma can follow the text: too early to say.

    From the end of the part backwards, a beginning is dead where each byte that may follow makes it a dead one or a
    part that was there. The first that is not ends the search, since adding a part changes nothing elsewhere.
    """
    part = frame.pending
    assert part is not None
    if source.bytes_after(text + b",") is None:
        return None
    quote = b'"' if frame.is_object else b""
    delimits_itself = bool(quote) or part[:1] in (b'"', b"[", b"{")
    whole = part[:-1] if delimits_itself and not quote else part
    used = {*frame.seen.texts()}
    dead = frame.dead
    for length in range(len(whole), -1, -1):
        beginning = whole[:length]
        following = source.bytes_after(text + b"," + quote + beginning)
        if following is None:
            break
        longer = [beginning + byte for byte in following]
        if not all(_is_used(b, used, quote) or any(b.startswith(known) for known in dead) for b in longer):
            break
        dead = (*(known for known in dead if not known.startswith(beginning)), beginning)
    return dead


def _is_used(text: bytes, used: set[bytes], quote: bytes) -> bool:
    """Whether the text is a part that was there, up to the byte that ends it."""
    if quote:
        return text.endswith(quote) and text[:-1] in used
    if text[:1] in (b'"', b"[", b"{"):
        return text in used
    return text[-1:] in (b",", b"]") and text[:-1] in used
