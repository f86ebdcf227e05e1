"""Terminals that the engine may not be able to follow are tried alone before a grammar is taken.

An intersection of many expressions, or one with a long bounded repeat, may have more states than the engine's limits
for one mask allow. That would show in the middle of a value; here it shows at the start.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import llguidance

from sglite.grammar import bitmask
from sglite.grammar.spelling import UNIT
from sglite.grammar.vocab import Vocab

_TRIED_TOKENS = 12  # of a walk
_SECONDS = 0.005  # CPU time of all trials of a grammar, after which no further step is begun; a failing one takes 0.1
_PLACES = (0.35, 0.75)  # one walk each: where, among the tokens that may come, the one that is taken stands
_MANY_OPERANDS = 3
_LONG_EXCLUDING = 100  # the same, where something is excluded
_MANY_TEXTS = 6  # places of any text in one terminal: two a pattern that is searched for
_LONG_REPEAT = 5_000  # all counts of one terminal multiplied
_PART = re.compile(r"\b\w*S\d+\b")  # within a literal, too: that one is then tried along
_HEAD = re.compile(r"\s*(\w+)")
_COUNT = re.compile(r"(?<!\\x)\{(\d+)(?:,(\d*))?\}")


def with_half_the_fuel(limits: llguidance.LLParserLimits) -> llguidance.LLParserLimits:
    """For trials: a text that is not tried may need more than those that are."""
    return llguidance.LLParserLimits(
        max_items_in_row=limits.max_items_in_row,
        initial_lexer_fuel=limits.initial_lexer_fuel,
        step_lexer_fuel=limits.step_lexer_fuel // 2,
        step_max_items=limits.step_max_items,
        max_lexer_states=limits.max_lexer_states,
        max_grammar_size=limits.max_grammar_size,
        verbose_errors=False,
    )


def trials(lark: str) -> Iterator[str]:
    """Grammars of the terminals that are to be tried, of a grammar that our front end wrote: together those that may
    begin at one place."""
    if " & " not in lark or not _may_be_entangled(lark):
        return
    definitions = {
        name: text for line in lark.split("\n") if (name := _terminal(line)) and (text := line[len(name) + 2 :])
    }
    sizes: dict[str, _Size] = {}
    terminals = [
        name for name in definitions if _stem(name)[:1] == "T" and _size(name, definitions, sizes).is_entangled
    ]
    if not terminals:
        return
    groups: dict[tuple[str, ...], None] = {}
    alone = dict.fromkeys(terminals)
    number = re.compile("|".join({_stem(name)[1:] + r"\b" for name in terminals}))
    for line in lark.split("\n"):
        if number.search(line) is None or _terminal(line):
            continue
        _, _, body = line.partition(":")
        heads = [_terminal_of(head[1]) for option in body.split("|") if (head := _HEAD.match(option))]
        group = tuple(dict.fromkeys(head for head in heads if head in terminals))
        if group:
            groups[group] = None
            for name in group:
                alone.pop(name, None)
    for group in (*groups, *((name,) for name in alone)):
        needed: dict[str, None] = {}
        stack = list(group)
        while stack:
            name = stack.pop()
            needed[name] = None
            stack += _parts(name, definitions)
        lines = [f"start: {' | '.join(group)}", *(f"{name}: {definitions[name]}" for name in needed)]
        yield "\n".join(lines) + "\n"


def _may_be_entangled(lark: str) -> bool:
    """A first look at all terminals at once, which tells that of most grammars: at most two lists of operands meet in
    one terminal."""
    lines = [line for line in lark.split("\n") if " & " in line or "{" in line or UNIT in line]
    operands = 2 * max([line.count(" & ") for line in lines])
    texts = sum([line.count(UNIT) for line in lines])
    counts = [int(most or least) for line in lines for least, most in _COUNT.findall(line)]
    return operands >= _MANY_OPERANDS or texts >= _MANY_TEXTS or math.prod(max(n, 1) for n in counts) >= _LONG_EXCLUDING


class _Size(NamedTuple):
    """Of a terminal with what it is made of."""

    operands: int  # but for one
    longest: int
    excludes: bool
    texts: int

    @property
    def is_entangled(self) -> bool:
        long = self.longest >= _LONG_REPEAT or (self.longest >= _LONG_EXCLUDING and self.excludes)
        return self.operands > 0 and (long or self.operands >= _MANY_OPERANDS or self.texts >= _MANY_TEXTS)


def _size(name: str, definitions: dict[str, str], known: dict[str, _Size]) -> _Size:
    found = known.get(name)
    if found is None:
        text = definitions[name]
        parts = [_size(part, definitions, known) for part in _parts(name, definitions)]
        counts = [max(int(most or least), 1) for least, most in _COUNT.findall(text)] if "{" in text else ()
        found = known[name] = _Size(
            text.count(" & ") + sum(part.operands for part in parts),
            math.prod([*counts, *(part.longest for part in parts)]),
            "~" in text or any(part.excludes for part in parts),
            text.count(UNIT) + sum(part.texts for part in parts),
        )
    return found


def _parts(name: str, definitions: dict[str, str]) -> list[str]:
    """The terminals that its definition mentions."""
    text = definitions[name]
    return [part for part in _PART.findall(text) if part in definitions] if "S" in text else []


def _terminal(line: str) -> str:
    """The terminal that the line defines, if it does."""
    name = line.partition(":")[0]
    return name if _stem(name)[:1] in ("T", "S") else ""


def _stem(name: str) -> str:
    """Without what tells the schemas of one grammar apart."""
    return name.rpartition("_")[2]


def _terminal_of(name: str) -> str:
    """Of a rule that is nothing but a terminal, that one's name."""
    prefix, line, last = name.rpartition("_")
    return f"{prefix.upper()}{line}T{last[1:]}" if last[:1] == "t" and last[1:].isdecimal() else name


def all_are_followed(
    lark: str,
    make: Callable[[str], llguidance.LLMatcher],
    check: Callable[[llguidance.LLMatcher], None],
    vocab: Vocab,
    *,
    seconds: float,
) -> bool:
    """False where the engine refuses a token that its mask allowed. `check` raises for a matcher that failed.
    `seconds`: what the grammar took to compile. A trial that would take up the time with its own compile is left out.
    """
    end = time.thread_time() + _SECONDS
    for trial in trials(lark):
        left = end - time.thread_time()
        if left <= 0:
            return True
        if seconds * len(trial) < left * len(lark) and not _is_followed(make(trial), check, vocab, end):
            return False
    return True


def _is_followed(
    matcher: llguidance.LLMatcher, check: Callable[[llguidance.LLMatcher], None], vocab: Vocab, end: float
) -> bool:
    if matcher.is_error():
        return True  # alone it is not even begun: nothing to learn
    row = bitmask.empty(vocab.size)
    for place in _PLACES:
        taken = 0
        for _ in range(_TRIED_TOKENS):
            if time.thread_time() > end:
                return True
            matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            check(matcher)
            legal = bitmask.ids(row & ~vocab.stop_mask)
            if not len(legal):
                break
            if matcher.try_consume_tokens([int(legal[int(place * len(legal))])]) != 1:
                check(matcher)
                return False
            taken += 1
        matcher.rollback(taken)
    return True
