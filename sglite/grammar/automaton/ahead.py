"""Meet the usual positions of a grammar before its first completion does.

    1. some texts of the grammar are drawn, byte by byte, that close what they open early
    2. each is walked over in the tokens of its canonical tokenisation; where an engine has to be asked, a copy of its
       matcher is left behind
    3. all copies say their masks at once, in native threads, and what they said is remembered

It is done in the thread that compiles, which gives the interpreter lock up after each little piece of work.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import numpy as np

from sglite.grammar import bitmask
from sglite.grammar.automaton.matcher import Followed, FollowedMatcher
from sglite.grammar.automaton.positions import Machine, Position
from sglite.grammar.automaton.state import State
from sglite.grammar.matcher import Bitmask, Matcher
from sglite.grammar.vocab import Vocab

_CLOSING = 0.6  # of the draws where a bracket, a comma or a quote may come
_MARKS = sum(1 << byte for byte in b'"{}[]:,')
_PLAIN = sum(1 << byte for byte in range(0x20, 0x7F))


def meet(
    grammar: Followed,
    vocab: Vocab,
    fill: Callable[[list[Matcher], Bitmask], None],
    finish: Callable[[Matcher, Bitmask], None],
    *,
    texts: int,
    most: int,
    end: float,
) -> None:
    """`texts` of up to `most` bytes; `fill` writes each matcher's mask into its row, up to what `finish` does to one.
    No text is read after time.thread_time() `end`. Nobody else may use the grammar's automaton meanwhile. Raises
    GrammarViolation, TooManyStates."""
    automaton = grammar.automaton
    assert automaton is not None
    rng = random.Random(0)
    left: dict[State, Matcher] = {}
    said = set()
    for _ in range(texts):
        text = draw(automaton.machine, rng, most, end).decode(errors="ignore")
        matcher = FollowedMatcher(grammar, vocab)
        for token_id in (-1, *vocab.encode(text)):
            if token_id >= 0 and not matcher.accept((token_id,)):
                break
            state = matcher.state
            if state is None or time.thread_time() > end:
                break
            # What is forced takes an engine milliseconds to tell, and is asked when somebody comes to it.
            if state.said not in said and state.said.ahead == 0 and automaton.mask(state) is None:
                said.add(state.said)
                left[state] = matcher.exact.fork()
            time.sleep(0)  # whoever waits for the interpreter goes first
    if not left:
        return
    rows = np.empty((len(left), bitmask.words(vocab.size)), np.int32)
    fill(list(left.values()), rows)
    for (state, own), row in zip(left.items(), rows, strict=True):
        finish(own, row)
        automaton.learn(state, row.copy())
        time.sleep(0)


def draw(machine: Machine, rng: random.Random, most: int, end: float) -> bytes:
    """The beginning of some text of the grammar, or a whole one."""
    data = bytearray()
    at: Position | None = machine.start
    while at is not None and len(data) < most and time.thread_time() < end:
        first = machine.first_bytes(at)
        if not first or (at.can_end and rng.random() < _CLOSING):
            break
        among = first & _PLAIN or first
        if among & _MARKS and rng.random() < _CLOSING:
            among &= _MARKS
        byte = _one_of(among, rng)
        at = machine.step(at, byte)
        if at is not None:
            data.append(byte)
        time.sleep(0)
    return bytes(data)


def _one_of(members: int, rng: random.Random) -> int:
    """A byte of the set; not all with the same chance."""
    start = rng.randrange(256)
    members = members >> start << start or members
    return (members & -members).bit_length() - 1
