"""The boundary of a healed prompt is verified in the prompt's own step, and nobody can tell by the text."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from sglite.grammar.matcher import Bitmask
from sglite.protocol import FinishReason
from sglite.runtime.scheduler.heals import Heals
from tests.fakes.executor import ScriptedExecutor, scripted_logits
from tests.runtime.harness import VOCAB, Harness


class Boundary:
    """The first token is one of a few, of which the prompt's own is one; then everything goes."""

    def __init__(self, token_id: int, width: int, count: int = 0) -> None:
        self.allowed = [(token_id + 7 * k) % 256 for k in range(width)]
        self._count = count

    def accept(self, token_ids: Sequence[int]) -> int:
        for i, token_id in enumerate(token_ids):
            if not self._count and token_id not in self.allowed:
                return i
            self._count += 1
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        self._count -= num_tokens

    def fork(self) -> Boundary:
        twin = Boundary(0, 0, self._count)
        twin.allowed = self.allowed
        return twin

    def fill(self, row: Bitmask) -> None:
        row.fill(-1 if self._count else 0)
        if not self._count:
            for token_id in self.allowed:
                row.view(np.uint32)[token_id >> 5] |= np.uint32(1 << (token_id & 31))

    def forced(self) -> list[int]:
        return []

    @property
    def can_stop(self) -> bool:
        return self._count > 0

    @property
    def finished(self) -> bool:
        return False


def _harness(width: int, **options: Any) -> Harness:
    """`width`: tokens that may stand at a boundary; 1: the prompt's own is always drawn."""
    harness = Harness(**options)
    harness.grammars.heal = lambda token_id, inner: Boundary(token_id, width)  # type: ignore[method-assign]
    return harness


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A harness that draws the boundary in a step of its own."""

    def make(width: int, **options: Any) -> Harness:
        harness = _harness(width, **options)
        monkeypatch.setattr(harness.core._scheduler.heals, "drafts", lambda request: False)
        return harness

    return make


@pytest.fixture(autouse=True)
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    """The share of boundaries that are spelled again does not decide in these tests."""
    monkeypatch.setattr(Heals, "saw", lambda self, again: None)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_a_boundary_that_is_spelled_again_costs_no_step(overlap: bool, max_tokens: int, one_by_one: Any) -> None:
    drafted, apart = _harness(1, overlap=overlap), one_by_one(1, overlap=overlap)
    outputs = [h.generate("hello wor", heal=True, max_tokens=max_tokens, ignore_eos=True) for h in (drafted, apart)]
    assert outputs[0] == outputs[1] or outputs[0].token_ids == outputs[1].token_ids
    assert len(outputs[0].token_ids) == max_tokens + 1
    assert outputs[0].text == outputs[1].text
    assert drafted.core.metrics.steps == apart.core.metrics.steps - 1
    assert outputs[0].usage.accepted_draft_tokens == 1


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("prompt", ["hello wor", "once upon", "a tree", "an end", "which?"])
def test_a_boundary_that_is_not_is_drawn_as_ever(overlap: bool, prompt: str, one_by_one: Any) -> None:
    drafted, apart = _harness(40, overlap=overlap), one_by_one(40, overlap=overlap)
    outputs = [h.generate(prompt, heal=True, max_tokens=6, ignore_eos=True) for h in (drafted, apart)]
    assert outputs[0].token_ids == outputs[1].token_ids
    assert outputs[0].text == outputs[1].text
    logits = scripted_logits(list(prompt.encode()[:-1]), VOCAB)
    assert outputs[0].token_ids[0] == max(Boundary(ord(prompt[-1]), 40).allowed, key=lambda i: logits[i])


def _fields(rng: random.Random) -> dict[str, Any]:
    fields: dict[str, Any] = {"heal": rng.random() < 0.8, "max_tokens": rng.choice((1, 2, 3, 12, 40))}
    fields |= {"stream": rng.random() < 0.5, "n": rng.choice((1, 1, 1, 3))}
    kind = rng.random()
    if kind < 0.3:
        fields |= {"temperature": 1.0, "seed": rng.randrange(1 << 40)}
    elif kind < 0.5:
        fields |= {"stop": ("a", "b"), "stop_token_ids": tuple(rng.sample(range(256), 20))}
    elif kind < 0.6:
        fields |= {"min_tokens": min(fields["max_tokens"], 2), "repetition_penalty": rng.choice((1.0, 1.1))}
    elif kind < 0.65:
        fields |= {"min_tokens": 1}
    elif kind < 0.75:
        fields |= {"logprobs": 1}
    if fields["n"] == 1 and rng.random() < 0.2:
        fields["hold"] = True
    return fields


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
@pytest.mark.parametrize(("page_size", "num_pages"), [(1, 170), (16, 12)])
@pytest.mark.parametrize("seed", range(4))
def test_every_answer_is_the_one_without_drafts(
    overlap: bool, page_size: int, num_pages: int, seed: int, one_by_one: Any
) -> None:
    rng = random.Random(seed)
    harness = _harness(
        3,
        overlap=overlap,
        page_size=page_size,
        num_pages=num_pages,
        max_rows=8,
        max_step_tokens=48,
        max_model_len=160,
        prompt_lookup=3 if seed % 2 else 0,
    )
    asked: dict[str, tuple[str, dict[str, Any]]] = {}
    aborted: set[str] = set()
    while len(asked) < 50:
        for _ in range(rng.randrange(4)):
            prompt = "the quick brown fox"[: rng.randint(2, 19)] + "".join(rng.choices("ab", k=rng.randint(0, 60)))
            fields = _fields(rng)
            asked[harness.add(prompt, **fields)] = prompt, fields
        for _ in range(rng.randrange(4)):
            harness.step()
        if asked and rng.random() < 0.2:
            request_id = rng.choice(list(asked))
            harness.core.abort(request_id)
            aborted.add(request_id)
        for held in [r for r, (_, f) in asked.items() if f.get("hold")]:
            if rng.random() < 0.2:
                harness.core.release(held)
    harness.run()
    assert harness.core.metrics.stale_tokens or not overlap
    for request_id, (prompt, fields) in asked.items():
        alone = one_by_one(3, num_pages=512)
        alone_id = alone.add(prompt, **{k: v for k, v in fields.items() if k != "hold"})
        alone.run()
        for index in range(fields["n"]):
            got, expected = harness.output(request_id, index), alone.output(alone_id, index)
            if got.finish_reason is FinishReason.ABORT:
                assert request_id in aborted
                assert expected.token_ids[: len(got.token_ids)] == got.token_ids
                continue
            assert got.token_ids == expected.token_ids
            assert got.text == expected.text
            assert (got.finish_reason, got.matched_stop) == (expected.finish_reason, expected.matched_stop)
            assert got.usage.completion_tokens == expected.usage.completion_tokens


def test_drafts_stop_where_boundaries_are_seldom_spelled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    heals = Heals()
    for _ in range(50):
        heals.saw(again=False)
    assert heals.share < 0.5
    for _ in range(50):
        heals.saw(again=True)
    assert heals.share > 0.5


@pytest.mark.parametrize(
    ("beside", "share", "max_tokens", "drafts"),
    [(False, None, 5, 1), (True, None, 1, 1), (True, None, 5, 0), (True, 0.9, 5, 1), (False, 0.4, 5, 0)],
)
def test_a_device_beside_the_host_verifies_boundaries_of_longer_answers_once_models_spell_them_again(
    beside: bool, share: float | None, max_tokens: int, drafts: int
) -> None:
    executor = ScriptedExecutor(overlaps=beside)
    harness = _harness(1, executor=executor, overlap=beside, max_model_len=512)
    if share is not None:
        harness.core._scheduler.heals.share = share
    output = harness.generate("hello wor", heal=True, max_tokens=max_tokens, ignore_eos=True)
    assert output.usage.draft_tokens == drafts
    assert len(output.token_ids) == max_tokens + 1
