"""Greedy text does not depend on how it was computed: the fifth promise, on the real model in float32.

A first difference counts unless the two best tokens there lie within 1e-4 of each other, where rounding may decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

import sglite as sgl
from sglite.protocol import RequestOutput

pytestmark = pytest.mark.model

SHARED = (
    "The following notes are about a small harbour town in the north. It has a lighthouse, two bakeries, a school "
    "with forty children and a ferry that leaves at six every morning. In winter the ferry does not run. "
)
PROMPTS = [
    SHARED + "The ferry",
    SHARED + "In the morning the children",
    SHARED + "The baker said that",
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time there was a fox who",
    "1, 2, 3, 5, 8,",
    "Ein kurzer Satz auf Deutsch:",
]
TOKENS = 16
GREEDY = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, "logprobs": 2}


def assert_same(reference: Sequence[RequestOutput], other: Sequence[RequestOutput]) -> None:
    assert len(reference) == len(other)
    for a, b in zip(reference, other, strict=True):
        assert len(a.token_ids) == len(b.token_ids) == TOKENS
        for i, (token_a, token_b) in enumerate(zip(a.token_ids, b.token_ids, strict=True)):
            if token_a != token_b:
                (_, first), (_, second) = a.logprobs[i].top[:2]
                assert first - second < 1e-4, f"differs at token {i}: {a.text!r} and {b.text!r}"
                break


def run(prompts: Any = PROMPTS, **options: Any) -> list[RequestOutput]:
    with sgl.Engine(model="smollm2", check_invariants=True, **options) as engine:
        outputs = engine.generate(prompts, GREEDY)
        stats = engine.stats()
    assert stats["accounting_problems"] == 0
    return outputs


@pytest.fixture(scope="module")
def one_by_one() -> list[RequestOutput]:
    """Each prompt alone, nothing cached, in the plain loop, whole."""
    with sgl.Engine(model="smollm2", prefix_cache=False, overlap=False) as engine:
        return [engine.generate(prompt, GREEDY) for prompt in PROMPTS]


def test_in_one_batch_and_from_the_cache(one_by_one: list[RequestOutput], engine: sgl.Engine) -> None:
    assert_same(one_by_one, engine.generate(PROMPTS, GREEDY))
    warm = engine.generate(PROMPTS, GREEDY)
    assert all(output.usage.cached_tokens for output in warm)
    assert_same(one_by_one, warm)


def test_in_chunks(one_by_one: list[RequestOutput]) -> None:
    assert_same(one_by_one, run(max_step_tokens=8, max_rows=8))


def test_in_the_overlapped_loop(one_by_one: list[RequestOutput]) -> None:
    assert_same(one_by_one, run(overlap=True))


def test_on_pages_of_sixteen(one_by_one: list[RequestOutput]) -> None:
    assert_same(one_by_one, run(page_size=16))


def test_with_rows_put_back_for_lack_of_memory(one_by_one: list[RequestOutput]) -> None:
    with sgl.Engine(model="smollm2", num_pages=150, check_invariants=True) as engine:
        outputs = engine.generate(PROMPTS, GREEDY)
        assert engine.stats()["retractions"] > 0
        assert engine.stats()["accounting_problems"] == 0
    assert_same(one_by_one, outputs)


def test_forked(one_by_one: list[RequestOutput], engine: sgl.Engine) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += SHARED
        forks = s.fork(3)
        for fork, prompt in zip(forks, PROMPTS, strict=False):
            fork += prompt.removeprefix(SHARED)
            fork += sgl.gen("text", temperature=0, max_tokens=TOKENS, ignore_eos=True)
        s["texts"] = [fork["text"] for fork in forks]

    texts = program.run(backend=engine)["texts"]
    for text, alone in zip(texts, one_by_one, strict=False):
        assert text == alone.text


def test_n_completions_equal_their_single_runs(engine: sgl.Engine) -> None:
    sampling = {"temperature": 0.8, "seed": 7, "max_tokens": 12, "ignore_eos": True}
    several = engine.generate(PROMPTS[3], {**sampling, "n": 3})
    assert len({output.text for output in several}) > 1
    again = engine.generate(PROMPTS[3], {**sampling, "n": 3})
    assert [o.text for o in several] == [o.text for o in again]
    beside_others = engine.generate([*PROMPTS[:3], PROMPTS[3]], [GREEDY, GREEDY, GREEDY, {**sampling, "n": 1}])
    assert beside_others[3].text == several[0].text
