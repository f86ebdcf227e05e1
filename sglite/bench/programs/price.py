"""What a recorded run should have cost. Pure functions of the calls.

The critical path is walked back from the call that ended last: its predecessor is the call of the same program that
ended last before it was sent (of any program, where its own has none: programs that wait for their turn). A call needs
one step for each piece of its prompt that is not cached and one for each further token that it draws, unless that was
drafted (the boundary to its prompt is); a step costs what the engine's steps took on average while the call ran.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sglite.bench.calibrate import Rates
from sglite.bench.floors import ModelCost
from sglite.bench.programs.record import Call, Warmed
from sglite.runtime.batch import IntArray
from sglite.runtime.cache.optimum import Access, distinct_tokens, optimal_hits

_SLACK_S = 1e-4  # clocks are read around the events, not at them


@dataclass(frozen=True, slots=True)
class Path:
    """`steps` that the longest chain needs, `seconds` that they cost at the run's own step times."""

    calls: int
    steps: int
    seconds: float
    program: str  # the one that ended last


def critical_path(calls: Sequence[Call], *, chunk: int) -> Path:
    """`chunk`: prompt tokens that a step takes at most."""
    if not calls:
        return Path(0, 0, 0.0, "")
    by_end = sorted(calls, key=lambda call: call.finished)
    last = by_end[-1]
    at: Call | None = last
    count = steps = 0
    seconds = 0.0
    while at is not None:
        needed = needed_steps(at, chunk=chunk)
        count, steps = count + 1, steps + needed
        seconds += needed * at.timing.step_s / at.timing.steps if at.timing.steps else at.timing.step_s
        at = _before(by_end, at)
    return Path(count, steps, seconds, last.program)


def needed_steps(call: Call, *, chunk: int) -> int:
    new = max(1, call.usage.prompt_tokens - call.usage.cached_tokens)
    pieces = -(-new // chunk)
    if not call.generates:
        return pieces
    usage = call.usage
    return pieces + max(0, usage.completion_tokens - usage.forced_tokens - usage.accepted_draft_tokens - 1)


def _before(by_end: Sequence[Call], call: Call) -> Call | None:
    earlier = [c for c in by_end if c.finished <= call.submitted + _SLACK_S and c is not call]
    own = [c for c in earlier if c.program == call.program]
    return own[-1] if own else (earlier[-1] if earlier else None)


def least_tokens(calls: Sequence[Call]) -> int:
    """Tokens that have to be computed at least once: an answer's last one need not be."""
    return distinct_tokens(_computed(calls))


def hit_rates(calls: Sequence[Call], warmed: Sequence[Warmed], *, capacity: int) -> tuple[float, float]:
    """Share of prompt tokens found in the cache, and the share that the best eviction would have found in the order
    in which the calls were admitted. `warmed` asks for nothing; whether it was admitted early or late is not known, so
    the better one counts. `capacity` in tokens."""
    admitted = [call for call in calls if call.timing.admitted]
    asked = sum(call.usage.prompt_tokens for call in admitted)
    if not asked:
        return 0.0, 0.0
    accesses: list[tuple[float, Access]] = []
    for call in admitted:
        for number, tokens in enumerate(_computed([call])):
            reads = len(call.prompt) - 1 if number == 0 else 0  # a scoring's options ask for the prompt once
            accesses.append((call.timing.admitted, Access(tokens, reads)))
    ahead = [Access(np.array(one.tokens, np.int32), 0) for one in warmed]
    early = [(one.submitted, access) for one, access in zip(warmed, ahead, strict=True)]
    late = [(one.finished, access) for one, access in zip(warmed, ahead, strict=True)]
    best = max(optimal_hits(_in_order(accesses + more), capacity) for more in (early, late))
    found = sum(min(call.usage.cached_tokens, len(call.prompt) - 1) for call in admitted)
    return found / asked, best / asked


def _in_order(timed: list[tuple[float, Access]]) -> list[Access]:
    return [access for _, access in sorted(timed, key=lambda entry: entry[0])]


def floor_seconds(calls: Sequence[Call], path: Path, cost: ModelCost, rates: Rates, *, pause_s: float) -> float:
    """The larger of two: the longest chain, each of its steps reading the weights once, with its tools' pauses; and
    the operations of all tokens that have to be computed."""
    chain = path.steps * cost.step(rates, kv_tokens=0) + pause_s
    return max(chain, 2 * least_tokens(calls) * cost.layer_weights / rates.matmul)


def _computed(calls: Sequence[Call]) -> list[IntArray]:
    return [
        np.array([*call.prompt, *answer[:-1]], np.int32)
        for call in calls
        for answer in (call.answers if call.answers else ((),))
    ]
