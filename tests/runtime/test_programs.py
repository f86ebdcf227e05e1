"""Programs against the same calls made loose: agents that come back to their growing prompts, in a cache too small."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from sglite.protocol import ProgramRef
from sglite.runtime.cache.eviction import LRU
from sglite.runtime.cache.radix_tree import Namespace
from tests.runtime.harness import Harness, greedy

PREAMBLE = [1 + i % 200 for i in range(60)]
TURNS = 5


@dataclass
class Agent:
    number: int
    began: float
    tokens: list[int] = field(default_factory=list)
    turn: int = 0
    ready: float = 0.0
    waiting_for: str | None = None

    def ref(self) -> ProgramRef:
        left = TURNS - 1 - self.turn
        return ProgramRef(
            program_id=f"agent {self.number}", arrival=self.began, remaining=left, wanted_again=-1 if left else 0
        )


def _react(num_agents: int, num_pages: int, *, programs: bool) -> tuple[float, Harness]:
    """Share of prompt tokens found in the cache when agents take turns with pauses between them."""
    now = [1.0]
    harness = Harness(
        num_pages=num_pages,
        max_rows=2,
        max_model_len=256,
        policy="program" if programs else "fcfs",
        clock=lambda: now[0],
        max_wait_s=1e9,
        lease_s=1e9,
        access_log=1000,
    )
    if not programs:
        harness.core._cache._tree._policy = LRU()
    rng = random.Random(0)
    agents = [Agent(i, began=1.0 + i * 1e-3, tokens=[*PREAMBLE, *[i] * 20]) for i in range(num_agents)]
    seen = 0
    while any(a.turn < TURNS for a in agents):
        for agent in agents:
            if agent.turn < TURNS and agent.waiting_for is None and agent.ready <= now[0]:
                fields = {"program": agent.ref()} if programs else {}
                agent.waiting_for = harness.add(agent.tokens, max_tokens=6, ignore_eos=True, **fields)
        harness.step()
        now[0] += 0.01
        for output in harness.outputs[seen:]:
            if output.finished:
                agent = next(a for a in agents if a.waiting_for == output.request_id)
                answer = harness.output(output.request_id)
                assert list(answer.token_ids) == greedy(agent.tokens, 6)
                agent.tokens += [*answer.token_ids, *(rng.randrange(256) for _ in range(9))]
                agent.turn, agent.waiting_for = agent.turn + 1, None
                agent.ready = now[0] + 0.05
        seen = len(harness.outputs)
    metrics = harness.core.metrics
    return metrics.cached_tokens / metrics.prompt_tokens, harness


def _optimum(harness: Harness, num_pages: int) -> float:
    """The hit rate of an eviction that knows the future (Belady), over the calls in the order that was served."""
    ids = list(dict.fromkeys(o.request_id for o in harness.outputs))
    calls = [(o.prompt_token_ids, o.prompt_token_ids + o.token_ids) for o in map(harness.output, ids)]
    keys = [[hash(whole[: i + 1]) for i in range(len(whole))] for _, whole in calls]
    reads: dict[int, list[int]] = {}
    for at, (prompt, _) in enumerate(calls):
        for key in keys[at][: len(prompt)]:
            reads.setdefault(key, []).append(at)
    cached: set[int] = set()
    hits = 0
    for at, (prompt, _) in enumerate(calls):
        reusable = keys[at][: len(prompt) - 1]
        hits += next((i for i, key in enumerate(reusable) if key not in cached), len(reusable))
        cached.update(keys[at])
        next_read = {key: next((t for t in reads.get(key, ()) if t > at), len(calls)) for key in cached}
        cached = set(sorted(cached, key=next_read.__getitem__)[:num_pages])
    return hits / sum(len(prompt) for prompt, _ in calls)


def test_agents_in_half_the_memory_they_need_find_what_the_best_eviction_would_have_kept() -> None:
    pages = (len(PREAMBLE) + 8 * (20 + TURNS * 15)) // 2
    loose, _ = _react(8, pages, programs=False)
    programs, harness = _react(8, pages, programs=True)
    assert harness.core.metrics.evicted_pages > 0
    assert programs >= 1.3 * loose
    assert programs >= 0.95 * _optimum(harness, pages)


def test_a_static_prefix_is_shared_by_all_programs_and_kept() -> None:
    need = len(PREAMBLE) + 8 * (20 + TURNS * 15)
    rate, harness = _react(8, need // 4, programs=True)
    assert harness.core._cache.match_length(Namespace(), np.array(PREAMBLE, np.int32)) == len(PREAMBLE)
    assert rate > 0.4


def _order(run: Callable[[Harness], None]) -> list[str]:
    harness = Harness(max_rows=1)
    run(harness)
    harness.run()
    return [o.request_id for o in harness.outputs if o.finished]


def test_the_program_with_the_longest_way_to_go_is_served_first_within_a_program() -> None:
    def run(harness: Harness) -> None:
        harness.add("busy", request_id="busy", max_tokens=3, ignore_eos=True)
        harness.step()
        for name, remaining in (("short", 0), ("long", 4)):
            ref = ProgramRef(program_id="p", arrival=1.0, remaining=remaining)
            harness.add(name, request_id=name, max_tokens=1, program=ref)

    assert _order(run) == ["busy", "long", "short"]


def test_an_old_program_does_not_starve_a_young_one_for_ever() -> None:
    now = [100.0]
    harness = Harness(max_rows=1, clock=lambda: now[0], max_wait_s=5.0)
    young = harness.add("young", max_tokens=1, program=ProgramRef(program_id="y", arrival=99.0))
    for i in range(20):
        harness.add(f"{i} old", max_tokens=1, program=ProgramRef(program_id="o", arrival=1.0))
        harness.step()
        now[0] += 1.0
        if any(o.request_id == young and o.finished for o in harness.outputs):
            break
    assert 4 <= i <= 8


def test_the_statistics_compare_the_cache_with_the_best_in_hindsight() -> None:
    pages = (len(PREAMBLE) + 8 * (20 + TURNS * 15)) // 2
    _, harness = _react(8, pages, programs=True)
    rates = harness.core.cache_rates()
    found = harness.core.metrics.cached_tokens / harness.core.metrics.prompt_tokens
    assert rates["recent_hit_rate"] == pytest.approx(found, abs=0.02)
    assert rates["best_hit_rate"] == pytest.approx(_optimum(harness, pages), abs=0.02)
    assert Harness().core.cache_rates() == {}
