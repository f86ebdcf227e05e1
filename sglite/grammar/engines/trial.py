"""Terminals that the engine may not be able to follow are tried alone before a grammar is taken.

An intersection of many expressions, or one with a long bounded repeat, may have more states than the engine's limits
for one mask allow. That would show in the middle of a value; here it shows at the start.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator

import llguidance

from sglite.grammar import bitmask
from sglite.grammar.spelling import UNIT
from sglite.grammar.vocab import Vocab

_TRIED_TOKENS = 12  # of a walk
_SECONDS = 0.008  # CPU time of all trials of a grammar, after which no further step is begun; a failing one takes 0.1
_PLACES = (0.35, 0.75)  # one walk each: where, among the tokens that may come, the one that is taken stands
_MANY_OPERANDS = 3
_LONG_EXCLUDING = 100  # the same, where something is excluded
_MANY_TEXTS = 6  # places of any text in one terminal: two a pattern that is searched for
_LONG_REPEAT = 5_000  # all counts of one terminal multiplied
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
    terminals = dict(_entangled(lark)) if " & " in lark else {}
    if not terminals:
        return
    groups: dict[tuple[str, ...], None] = {}
    alone = dict.fromkeys(terminals)
    number = re.compile("|".join({name.rpartition("T")[2] + r"\b" for name in terminals}))
    for line in lark.split("\n"):
        if number.search(line) is None or _is_terminal(line):
            continue
        _, _, body = line.partition(":")
        heads = [_terminal_of(head[1]) for option in body.split("|") if (head := _HEAD.match(option))]
        group = tuple(dict.fromkeys(head for head in heads if head in terminals))
        if group:
            groups[group] = None
            for name in group:
                alone.pop(name, None)
    for group in (*groups, *((name,) for name in alone)):
        lines = [f"start: {' | '.join(group)}", *(f"{name}: {terminals[name]}" for name in group)]
        yield "\n".join(lines) + "\n"


def _entangled(lark: str) -> Iterator[tuple[str, str]]:
    for line in lark.split("\n"):
        operands = line.count(" & ")
        if operands and _is_terminal(line):
            name, _, expression = line.partition(": ")
            longest = math.prod(max(int(most or least), 1) for least, most in _COUNT.findall(expression))
            long = longest >= _LONG_REPEAT or (longest >= _LONG_EXCLUDING and "~" in expression)
            if long or operands >= _MANY_OPERANDS or expression.count(UNIT) >= _MANY_TEXTS:
                yield name, expression


def _is_terminal(line: str) -> bool:
    return line.partition(":")[0].rpartition("_")[2][:1] == "T"


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
