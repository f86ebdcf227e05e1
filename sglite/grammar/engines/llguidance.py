"""llguidance: JSON schema (as Lark from our front end), JSON object, regex, choice and Lark.

Facts of 1.9.1 that this file rests on (tests/grammar/engines/test_llguidance.py holds them down):
- A matcher that failed (row limit, lexer fuel) is in an error state for good, and its mask then shows the stop
  ids alone: every fill is followed by a look at the error flag.
- `try_consume_tokens` stops before an illegal token and leaves the matcher usable; `consume_token` does not.
- It takes no stop id once nothing else may follow, so stop ids are counted here and never shown to it.
- `deep_copy` copies the lexer's automaton too: a copy of a warmed matcher is warm. But all copies of one matcher share
  a lock that each holds while it computes a mask: masks of copies of one template are made one after another, however
  many threads there are. Hence several templates (`Templates`), and fills sorted by template.
- Where bytes are forced, the mask allows the canonical token only.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import llguidance
import numpy as np

from sglite.errors import GrammarTooLarge, GrammarViolation, InvalidGrammar
from sglite.grammar import bitmask
from sglite.grammar.automaton.ahead import meet
from sglite.grammar.automaton.kinds import followed_text
from sglite.grammar.automaton.matcher import FollowedMatcher
from sglite.grammar.automaton.pace import Pace
from sglite.grammar.automaton.regex import TooManyStates
from sglite.grammar.automaton.states import Automaton, Follower
from sglite.grammar.engines.forcing import is_forced
from sglite.grammar.engines.trial import all_are_followed, with_half_the_fuel
from sglite.grammar.matcher import Bitmask, Matcher
from sglite.grammar.vocab import Vocab
from sglite.protocol import GrammarSpec

MAX_FORCED = 64  # tokens that one call of forced() looks ahead
MAX_FORCED_BYTES = 16_384  # each mask looks over all the text that is forced from its place

LIMITS = llguidance.LLParserLimits(
    max_items_in_row=50_000,  # 1,000 optional keys are 3,000 items
    initial_lexer_fuel=5_000_000,  # 100 ms
    step_lexer_fuel=8_000_000,  # 160 ms, once: what a bounded string must not hold takes up to 4,000,000
    step_max_items=50_000,
    max_lexer_states=100_000,
    max_grammar_size=500_000,
    verbose_errors=False,
)

# Sets of tokens whose masks are kept ready: where all of a set may come, none of its tokens is looked at. llguidance's
# own have lengths 10, 30 and any; the shorter ones make masks near the end of a bounded string 1.6 times faster
# (SCHEMA of the benchmarks, 152k tokens: mean 0.43 -> 0.27 ms).
_TEXT = r'[^"\\\x00-\x1F\x7F]'
_SLICES = [r"[\x20\x0A\x0D\x09]+", *(_TEXT + f"{{1,{n}}}" for n in (2, 4, 6, 8, 12, 16, 30)), _TEXT + "+"]


@dataclass(frozen=True, slots=True, eq=False)
class Start:
    """What the engine says before the first token, told when the grammar is compiled."""

    mask: Bitmask  # int32[words], not to be written
    forced: tuple[int, ...]
    after: Mapping[int, llguidance.LLMatcher] = field(default_factory=dict)
    # where the first token takes long to take: matchers that have taken it, to be copied


class LLGuidanceMatcher:
    """See `sglite.grammar.matcher.Matcher`."""

    __slots__ = ("_forces", "_num_stops", "_num_tokens", "_start", "_vocab", "lock_group", "native")

    def __init__(
        self,
        native: llguidance.LLMatcher,
        vocab: Vocab,
        lock_group: int = 0,
        start: Start | None = None,
        *,
        forces: bool = True,
    ) -> None:
        self.native = native
        self._forces = forces  # see sglite.grammar.engines.forcing
        self.lock_group = lock_group  # those of one group fill one after another
        self._vocab = vocab
        self._start = start
        self._num_tokens = 0  # taken by native
        self._num_stops = 0  # stop ids accepted after them

    @property
    def vocab_size(self) -> int:
        return self._vocab.size

    @property
    def num_tokens(self) -> int:
        """Taken so far, stop ids included."""
        return self._num_tokens + self._num_stops

    @property
    def start(self) -> Start | None:
        """Where no token was taken, and it is known."""
        return None if self._num_tokens or self._num_stops else self._start

    def accept(self, token_ids: Sequence[int]) -> int:
        done = 0
        stop_ids = self._vocab.stop_ids
        for token_id in token_ids:
            if token_id in stop_ids:
                if not self.can_stop:
                    break
                self._num_stops += 1
            elif self._num_stops or not 0 <= token_id < self._vocab.size:
                break
            elif self.takes_first(token_id):
                pass
            elif self.native.try_consume_tokens([token_id]) == 1:
                self._num_tokens += 1
            else:
                break
            done += 1
        return done

    def takes_first(self, token_id: int) -> bool:
        """Whether the token was taken, the first one, as when the grammar was compiled."""
        after = None if (start := self.start) is None else start.after.get(token_id)
        if after is None:
            return False
        self.native, self.lock_group = after.deep_copy(), id(after)
        self._num_tokens = 1
        return True

    def takes(self, token_id: int) -> bool:
        """It is native's to say whether the token is legal."""
        return token_id not in self._vocab.stop_ids and not self._num_stops and 0 <= token_id < self._vocab.size

    def consumed(self) -> None:
        """Native took one token."""
        self._num_tokens += 1

    def rollback(self, num_tokens: int) -> None:
        assert 0 <= num_tokens <= self._num_tokens + self._num_stops, "rollback past the start"
        stops = min(num_tokens, self._num_stops)
        self._num_stops -= stops
        if num_tokens > stops:
            self.native.rollback(num_tokens - stops)
            self._num_tokens -= num_tokens - stops

    def fork(self) -> LLGuidanceMatcher:
        native = self.native.deep_copy()
        twin = LLGuidanceMatcher(native, self._vocab, self.lock_group, self._start, forces=self._forces)
        twin._num_tokens, twin._num_stops = self._num_tokens, self._num_stops
        return twin

    def fill(self, row: Bitmask) -> None:
        assert row.flags.c_contiguous and row.shape == (bitmask.words(self._vocab.size),)
        if (start := self.start) is not None:
            row[:] = start.mask
            return
        self._fill_native(row)
        self.finish_fill(row)

    def _fill_native(self, row: Bitmask) -> None:
        self.native.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)

    @property
    def needs_finish(self) -> bool:
        """Native's own fill is not the last word here. Asked after it."""
        native = self.native  # in error also means stopped
        return self._num_stops > 0 or native.is_stopped() or bool(self._forced_text())

    def finish_fill(self, row: Bitmask) -> None:
        """What follows native's own fill of `row`, wherever that ran."""
        if self.native.is_error():
            raise GrammarViolation(f"the grammar cannot go on from here: {_error(self.native)}")
        if self._num_stops or self.native.is_stopped():
            row[:] = self._vocab.stop_mask
        elif text := self._forced_text():
            token_id = self._vocab.sole_tokens.find(self.native, text, row, self._fill_native)
            if token_id is not None:
                row.fill(0)
                row.view(np.uint32)[token_id >> 5] = np.uint32(1 << (token_id & 31))

    def forced(self) -> list[int]:
        """Piece by piece, as a step-by-step walk would find it."""
        if (start := self.start) is not None:
            return list(start.forced)
        found: list[int] = []
        while len(found) < MAX_FORCED and (piece := self._forced_piece()):
            taken = self.native.try_consume_tokens(piece[: MAX_FORCED - len(found)])
            if not taken:
                break
            found += piece[:taken]
        if found:
            self.native.rollback(len(found))
        return found

    def _forced_text(self) -> bytes:
        return self.native.compute_ff_bytes() if self._forces else b""

    def _forced_piece(self) -> list[int]:
        """llguidance splits the whole forced text at once; a step-by-step walk would split what is left at each
        token. `ForcedTexts` keeps the tokens on which both agree."""
        native = self.native
        if self._num_stops or not (text := self._forced_text()):
            return []
        tokens = native.compute_ff_tokens()[:MAX_FORCED]
        if len(tokens) > 1:
            tokens = self._vocab.forced_texts.agreed(text, tokens)
        if tokens or native.is_stopped():
            return tokens
        row = bitmask.empty(self._vocab.size)
        self._fill_native(row)
        token_id = self._vocab.sole_tokens.find(native, text, row, self._fill_native)
        return [] if token_id is None else [token_id]

    @property
    def can_stop(self) -> bool:
        return self._num_stops > 0 or (self.native.is_accepting() and not self.native.is_error())

    @property
    def finished(self) -> bool:
        return self._num_stops > 0 or (self.native.is_stopped() and not self.native.is_error())


class Templates:
    """Matchers at the start of one grammar, never advanced; the matchers of requests are copies of them, in turn.

    There are as many as fill in parallel, made one by one as matchers are asked for, in a thread (2 ms each for a
    typical grammar), as long as one is cheap and the engine's `spare` ones last; they are given back with the grammar.
    """

    def __init__(
        self, first: llguidance.LLMatcher, make: Callable[[], llguidance.LLMatcher], *, most: int, spare: Spare
    ) -> None:
        self._all = [first]
        self._make = make
        self._most = most
        self._spare = spare
        self._next = 0
        self._making = False
        self._lock = threading.Lock()

    def __del__(self) -> None:
        self._spare.give(len(self._all) - 1)

    def copy(self) -> tuple[llguidance.LLMatcher, int]:
        """A matcher at the start, and which lock it shares."""
        with self._lock:
            place, self._next = self._next, (self._next + 1) % self._most
            if place >= len(self._all):
                if not self._making and self._most > 1 and self._spare.take():
                    self._making = True
                    threading.Thread(target=self._add, name="sglite-template", daemon=True).start()
                place %= len(self._all)
            template = self._all[place]
            return template.deep_copy(), id(template)

    def _add(self) -> None:
        made = self._make()
        with self._lock:
            self._all.append(made)
            self._making = False


class Spare:
    """How many templates beyond the first of each grammar an engine may still make."""

    def __init__(self, count: int) -> None:
        self._left = count
        self._lock = threading.Lock()

    def take(self) -> bool:
        with self._lock:
            if not self._left:
                return False
            self._left -= 1
            return True

    def give(self, count: int) -> None:
        with self._lock:
            self._left += count


@dataclass(slots=True)
class LLGuidanceGrammar:
    """What is shared by all completions under one constraint. `automaton`: its positions, where they can be followed;
    a full one is replaced.

    Reading a grammar for its automaton takes about as long as compiling it (1 to 3 ms for typical schemas, more for
    large ones). A short one is read right after its compile. A long one pays from the second completion on, so that is
    when it is begun, in a thread; completions under way follow it from when it is there.
    """

    spec: GrammarSpec
    nbytes: int
    templates: Templates = field(repr=False)
    vocab: Vocab = field(repr=False)
    text: str = field(repr=False, default="")
    follower: Follower | None = field(repr=False, default=None)
    automaton: Automaton | None = field(repr=False, default=None)
    completions: int = field(repr=False, default=0)
    start: Start | None = field(repr=False, default=None)
    forces: bool = True
    is_read: bool = field(repr=False, default=False)  # for its automaton, or being read
    is_ready: threading.Event = field(repr=False, default_factory=threading.Event)  # see LLGuidanceEngine.get_ready

    def matcher(self) -> Matcher:
        self.completions += 1
        if self.follower is None:
            return self.exact_matcher()
        if self.automaton is not None and self.automaton.full:  # those under way keep the old one
            self.automaton, self.is_read = None, False
        if self.automaton is None and self.completions >= 2 and self.is_ready.is_set() and not self.is_read:
            self.is_read = True  # by one thread: completions that follow two automata would meet each place twice
            threading.Thread(target=self._read, args=(Pace(),), name="sglite-follow", daemon=True).start()
        return FollowedMatcher(self, self.vocab)

    def read_if_short(self) -> None:
        if self.follower is not None and len(self.text) <= _SHORT_TEXT:
            self._read()

    def _read(self, pause: Callable[[], None] | None = None) -> None:
        assert self.follower is not None
        self.automaton = self.follower.automaton(self.text, pause)
        if self.automaton is None:
            self.follower = None

    def exact_matcher(self) -> LLGuidanceMatcher:
        native, lock_group = self.templates.copy()
        return LLGuidanceMatcher(native, self.vocab, lock_group, self.start, forces=self.forces)


_SHORT_TEXT = 1024  # characters of a grammar that is read at once: 2 ms; at 2,700 some take 100
_AHEAD_TEXTS = 3  # of a new grammar, whose positions are met before anybody uses it
_AHEAD_BYTES = 130
_AHEAD_SECONDS = 0.008
_SLOW_FIRST_S = 0.001  # of the first and the last token
_MOST_FIRST = 16  # tokens that may be the first
_SPARE_TEMPLATES = 512  # about 0.3 MB each
_CHEAP_TEMPLATE_S = 0.005


class LLGuidanceEngine:
    """Makes grammars for one vocabulary. Making its tables takes 0.2 s for 49k tokens, 0.7 s for 152k.

    `parallel`: how many threads fill the masks of one grammar's matchers. `follow`: remember what was said at the
    positions of a grammar, where they can be told.
    """

    name = "llguidance"

    def __init__(
        self, vocab: Vocab, limits: llguidance.LLParserLimits = LIMITS, *, parallel: int = 1, follow: bool = True
    ) -> None:
        self.vocab = vocab
        self._follower = Follower(vocab) if follow else None
        self._limits = limits
        self._parallel = parallel
        self._spare = Spare(_SPARE_TEMPLATES)
        self._executor = llguidance.LLExecutor(min(parallel, 2 * _AHEAD_TEXTS))
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_TokenTable(vocab)),
            n_vocab=vocab.size,
            eos_token=list(vocab.stop_ids),
            slices=_SLICES,
        )

    def compile(self, spec: GrammarSpec, grammar: str) -> LLGuidanceGrammar:
        """`grammar`: what one of `LLMatcher.grammar_from_*` gave. Computes the first mask.

        Raises InvalidGrammar or GrammarTooLarge.
        """

        def make() -> llguidance.LLMatcher:
            return llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)

        began = time.thread_time()
        first = make()
        seconds = time.thread_time() - began
        _check(first)
        forces = is_forced(grammar)
        start = self._start(first, forces=forces)
        first = make() if first.is_error() else first  # it cannot follow all that is forced
        if spec.kind in ("json_schema", "tools"):
            self._try_terminals(grammar, seconds)
        most = self._parallel if seconds < _CHEAP_TEMPLATE_S else 1
        templates = Templates(first, make, most=most, spare=self._spare)
        text = followed_text(spec, grammar)
        follower = None if text is None else self._follower
        found = LLGuidanceGrammar(spec, _estimate_nbytes(grammar), templates, self.vocab, text or "", follower)
        found.forces = forces
        found.start = start
        return found

    def get_ready(self, grammar: LLGuidanceGrammar) -> None:
        """Read a short grammar for its automaton, and know its usual positions before a completion comes to them: about
        10 ms, for which no completion waits. Those under way follow it from when it is there."""
        twin = replace(grammar)  # nobody else may use the automaton while its positions are met
        try:
            twin.read_if_short()
            grammar.follower = twin.follower
            if twin.automaton is not None:
                self._meet(twin)
                grammar.automaton = twin.automaton
        finally:
            grammar.is_ready.set()

    def _meet(self, grammar: LLGuidanceGrammar) -> None:
        """Know the usual positions before the first completion comes to them."""

        def fill(matchers: list[Matcher], rows: Bitmask) -> None:
            natives = [matcher for matcher in matchers if isinstance(matcher, LLGuidanceMatcher)]
            width = rows.shape[1]
            self._executor.unsafe_compute_mask_ptr(
                [(matcher.native, row) for row, matcher in enumerate(natives)], rows.ctypes.data, 4 * width, len(rows)
            )

        def finish(matcher: Matcher, row: Bitmask) -> None:
            assert isinstance(matcher, LLGuidanceMatcher)
            matcher.finish_fill(row)

        try:
            end = time.thread_time() + _AHEAD_SECONDS
            meet(grammar, self.vocab, fill, finish, texts=_AHEAD_TEXTS, most=_AHEAD_BYTES, end=end)
        except (GrammarViolation, TooManyStates):
            return  # it comes to a limit somewhere: whoever gets there is told

    def _try_terminals(self, grammar: str, seconds: float) -> None:
        limits = with_half_the_fuel(self._limits)

        def make(lark: str) -> llguidance.LLMatcher:
            return llguidance.LLMatcher(self._tokenizer, lark, log_level=0, limits=limits)

        if not all_are_followed(grammar, make, _check, self.vocab, seconds=seconds):
            raise GrammarTooLarge("the grammar engine cannot follow its own mask: a string is too entangled")

    def _start(self, template: llguidance.LLMatcher, *, forces: bool) -> Start:
        row, after = self._try_first_token(template, forces=forces)
        begin = LLGuidanceMatcher(template, self.vocab, forces=forces)
        begin.finish_fill(row)
        return Start(row, tuple(begin.forced()), after)

    def _try_first_token(
        self, template: llguidance.LLMatcher, *, forces: bool
    ) -> tuple[Bitmask, dict[int, llguidance.LLMatcher]]:
        """Make the first mask as the engine says it, and have the first and the last token that it allows taken.

        Some limits of the engine only show when a token that the mask allowed is taken: better here than in a request.
        Where it takes long (with many keys, milliseconds, with the interpreter lock held), the matchers that took them
        are returned by token: a step of the engine would wait for each completion's first token.
        """
        row = bitmask.empty(self.vocab.size)
        template.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        _check(template)
        if forces and len(template.compute_ff_bytes()) > MAX_FORCED_BYTES:
            raise GrammarTooLarge(f"the constraint forces over {MAX_FORCED_BYTES} bytes of text in one piece")
        ends = bitmask.ends(row & ~self.vocab.stop_mask)
        if not ends and not template.is_accepting():
            raise InvalidGrammar("no token of this model can begin a text that satisfies the constraint")
        began = time.perf_counter()
        after = {token_id: _having_taken(template, token_id) for token_id in ends}
        if time.perf_counter() - began < _SLOW_FIRST_S:
            return row, {}
        ids = bitmask.ids(row & ~self.vocab.stop_mask).tolist()
        if len(ids) <= _MOST_FIRST:
            after |= {token_id: _having_taken(template, token_id) for token_id in ids if token_id not in after}
        return row, after


def _having_taken(template: llguidance.LLMatcher, token_id: int) -> llguidance.LLMatcher:
    """A copy; the template stays as it is, with what it knows of its mask. Raises GrammarTooLarge."""
    copy = template.deep_copy()
    if copy.try_consume_tokens([token_id]) != 1:
        _check(copy)
        raise GrammarTooLarge("the grammar engine cannot follow its own mask: the constraint is too large")
    _check(copy)
    return copy


_ENCODE_CACHE = 4096  # texts


class _TokenTable:
    """What llguidance reads a vocabulary from."""

    def __init__(self, vocab: Vocab) -> None:
        self.tokens = [name or text for name, text in zip(vocab.names, vocab.tokens, strict=True)]
        self.special_token_ids = [i for i, name in enumerate(vocab.names) if name]
        self.eos_token_id = vocab.stop_ids[0]
        self.bos_token_id = None
        self._encode = lru_cache(_ENCODE_CACHE)(vocab.encode)

    def __call__(self, text: str | bytes) -> list[int]:
        """Called back at forced places, with the same few texts (keys, punctuation) again and again."""
        return self._encode(text if isinstance(text, str) else text.decode())


_TOO_LARGE = ("too large", "too many", "max is", "limit", "fuel", "too complex", "nested too deeply")


def _check(native: llguidance.LLMatcher) -> None:
    if not native.is_error():
        return
    message = _error(native)
    if not message or "NoExtension" in message:
        raise InvalidGrammar("no text at all satisfies the constraint")
    if any(mark in message for mark in _TOO_LARGE):
        raise GrammarTooLarge(f"the constraint is too large: {message[:500]}")
    raise InvalidGrammar(f"the constraint cannot be used: {message[:500]}")


def _error(native: llguidance.LLMatcher) -> str:
    return native.get_error().replace("<non-verbose/>", "").strip()


def _estimate_nbytes(grammar: str) -> int:
    """Native memory is not reported; tables grow with the grammar's text (seen: about 0.1 MB for typical schemas)."""
    return 64 * 1024 + 24 * len(grammar)
