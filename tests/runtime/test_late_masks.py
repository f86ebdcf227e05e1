"""A row whose mask is not there in time is sampled a step later; the text is the same and nobody waits."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence

import pytest

from sglite.grammar.matcher import Asked, Matcher
from sglite.runtime.batch import NO_MASK
from tests.fakes.executor import ScriptedExecutor
from tests.fakes.matcher import BatchLoopFiller, LoopFiller, choice
from tests.runtime.harness import Harness

TEXTS = choice(*(f"{first}{second * 6}{third}" for first in "abc" for second in "xyz" for third in "123"))
PROMPTS = [f"prompt {i}" for i in range(12)]


class _Ask:
    def __init__(self, matcher: Matcher, steps: int) -> None:
        self.matcher = matcher
        self.steps = steps
        self.done = False


class SlowFiller(BatchLoopFiller):
    """Some masks take a few steps (`share` of them, at random), or until somebody waits for them to the end."""

    def __init__(self, share: float, seed: int = 0) -> None:
        super().__init__()
        self._share = share
        self._rng = random.Random(seed)
        self._asks: dict[int, _Ask] = {}
        self.waits = 0

    def begin(self, matchers: Sequence[Matcher], *, alone: bool = False) -> Mapping[int, Asked]:
        found: dict[int, Asked] = {}
        for i, matcher in enumerate(matchers):
            ask = self._asks.get(id(matcher))
            if ask is not None:
                ask.steps -= 1
                if not ask.steps:
                    ask.done = True
                    del self._asks[id(matcher)]
                    continue
            elif self._rng.random() < self._share:
                ask = self._asks[id(matcher)] = _Ask(matcher, self._rng.randint(1, 3))
            else:
                continue
            found[i] = ask
        return found

    def wait(self, asked: Iterable[Asked], seconds: float) -> None:
        if seconds < 1:
            return
        self.waits += 1
        for ask in asked:
            ask.done = True
            if isinstance(ask, _Ask):
                self._asks.pop(id(ask.matcher), None)

    def advance(self, matchers: Sequence[Matcher], token_ids: Sequence[int]) -> list[int]:
        assert not any(id(matcher) in self._asks for matcher in matchers), "a matcher is used while it is asked"
        return super().advance(matchers, token_ids)


def harness_of(filler: LoopFiller, *, overlap: bool = True, caught_up: bool = True, **options: object) -> Harness:
    executor = ScriptedExecutor(num_pages=4096, max_rows=32, max_len=512, overlaps=True)
    if caught_up:
        executor.caught_up = lambda: True  # type: ignore[attr-defined]
    return Harness(executor=executor, filler=filler, overlap=overlap, **options)


def answers(harness: Harness, **fields: object) -> list[object]:
    ids = [harness.add(prompt, grammar=TEXTS, jump_forward=False, **fields) for prompt in PROMPTS]
    ids += [harness.add(f"free {i}", max_tokens=20, ignore_eos=True) for i in range(3)]
    harness.run()
    return [(harness.output(i).token_ids, harness.output(i).finish_reason, harness.output(i).usage) for i in ids]


@pytest.mark.parametrize(
    "fields", [{}, {"temperature": 1.0, "seed": 7}, {"logprobs": 2}], ids=["greedy", "t=1", "logprobs"]
)
@pytest.mark.parametrize("share", [0.2, 1.0])
def test_late_masks_change_no_text(share: float, fields: dict[str, object]) -> None:
    want = answers(harness_of(LoopFiller(), overlap=False), **fields)
    harness = harness_of(SlowFiller(share))
    assert answers(harness, **fields) == want
    assert harness.core.metrics.late_tokens > 10


def test_free_rows_take_no_step_more_beside_late_ones() -> None:
    harness = harness_of(SlowFiller(1.0))
    bound = [harness.add(prompt, grammar=TEXTS, jump_forward=False) for prompt in PROMPTS]
    free = harness.add("free", max_tokens=12, ignore_eos=True)
    ends: dict[str, int] = {}
    for step in range(200):
        for output in harness.step():
            if output.finished:
                ends[output.request_id] = step
        if not harness.core.has_work:
            break
    assert ends[free] <= 13
    assert max(ends[i] for i in bound) > 16


def test_a_row_alone_waits_for_its_mask() -> None:
    filler = SlowFiller(1.0)
    harness = harness_of(filler)
    harness.generate("alone", grammar=TEXTS, jump_forward=False)
    assert harness.core.metrics.late_tokens == 0
    assert filler.waits >= 8


def test_the_first_token_and_rows_whose_draws_are_counted_wait() -> None:
    filler = SlowFiller(1.0)
    harness = harness_of(filler)
    harness.add("free", max_tokens=30, ignore_eos=True)
    harness.add("counted", grammar=TEXTS, jump_forward=False, presence_penalty=0.5)
    harness.run()
    assert harness.core.metrics.late_tokens == 0
    assert filler.waits >= 8


@pytest.mark.parametrize("options", [{"caught_up": False}, {"prompt_lookup": 4}], ids=["not told", "drafts"])
def test_nobody_is_late_where_it_cannot_be_told_or_drafts_look_at_the_matcher(options: dict[str, object]) -> None:
    want = answers(harness_of(LoopFiller(), overlap=False))
    harness = harness_of(SlowFiller(0.5), **options)  # type: ignore[arg-type]
    got = answers(harness)
    assert [one[:2] for one in got] == [one[:2] for one in want]  # type: ignore[index]
    assert harness.core.metrics.late_tokens == 0


def test_a_request_that_is_aborted_while_its_mask_is_made_leaves_nothing_behind() -> None:
    filler = SlowFiller(1.0)
    harness = harness_of(filler)
    free = harness.add("free", max_tokens=40, ignore_eos=True)
    bound = harness.add("bound", grammar=TEXTS, jump_forward=False)
    for _ in range(30):
        harness.step()
        if harness.core.metrics.late_tokens:
            break
    harness.core.abort(bound)
    harness.run()
    assert len(harness.output(free).token_ids) == 40


def test_a_late_row_draws_without_a_mask_and_computes_its_token_again() -> None:
    harness = harness_of(SlowFiller(1.0))
    harness.add("free", max_tokens=12, ignore_eos=True)
    harness.add("bound", grammar=TEXTS, jump_forward=False)
    harness.run()
    batches = [b for b in harness.executor.batches if len(b.rows) == 2]
    again = [(b, c) for b, c in zip(batches, batches[1:], strict=False) if b.starts[1] == c.starts[1]]
    assert again
    for early, late in again:
        assert early.mask_slots[1] == NO_MASK
        assert early.output_index[1] == late.output_index[1]
        assert late.token_ids[1] >= 0, "the token is known to the host by now"
