from __future__ import annotations

import numpy as np
import pytest

from sglite.runtime.scheduler.drafts import look_up
from tests.fakes.matcher import TextsMatcher, choice
from tests.runtime.harness import Harness, greedy

BOTH_LOOPS = pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
REPEATS = '[{"name": "abc"}, {"name": "abd"}, {"name": "abe"}]'


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 9, 1, 2], [3, 9, 1]),
        ([1, 2, 3, 1, 2, 4, 1, 2], [4, 1, 2]),  # of equals the latest
        ([7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2], [3, 8, 1]),  # further back agrees the earlier
        ([5, 1, 2, 6, 2], []),  # one token is no match
        ([1, 1, 1, 1], [1]),
        ([1], []),
    ],
)
def test_look_up(tokens: list[int], expected: list[int]) -> None:
    assert look_up(np.array(tokens, np.int32), 3).tolist() == expected


@BOTH_LOOPS
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_do_not_change_the_text(overlap: bool, page_size: int, temperature: float) -> None:
    fields = {"max_tokens": 60, "temperature": temperature, "seed": 3, "logit_bias": {97: 20.0, 98: 19.0, 99: 18.5}}
    plain = Harness(page_size=page_size)
    harness = Harness(overlap=overlap, page_size=page_size, prompt_lookup=4)
    ids = [harness.add(f"{i} abcabcabc", **fields) for i in range(3)]
    harness.run()
    for i, request_id in enumerate(ids):
        output, expected = harness.output(request_id), plain.generate(f"{i} abcabcabc", **fields)
        assert output.token_ids == expected.token_ids
        assert output.finish_reason == expected.finish_reason
    assert harness.core.metrics.accepted_draft_tokens > 0
    assert harness.core.metrics.steps < plain.core.metrics.steps / 3 + 60


@BOTH_LOOPS
def test_drafts_are_verified_under_the_grammar(overlap: bool) -> None:  # R71, R73, R75
    spec = choice(REPEATS, REPEATS.replace("abe", "xyz"))
    for prompt in ("copy: " + REPEATS, "no copy"):
        slow = Harness().generate(prompt, grammar=spec, jump_forward=False)
        harness = Harness(overlap=overlap, prompt_lookup=5)
        fast = harness.generate(prompt, grammar=spec, jump_forward=False)
        assert fast.text == slow.text
        assert fast.usage.accepted_draft_tokens > 5
        assert harness.core.metrics.steps < len(fast.token_ids)
        assert fast.usage.completion_tokens == len(fast.token_ids)


@BOTH_LOOPS
def test_an_illegal_draft_is_cut_before_it_is_tried(overlap: bool) -> None:  # R71
    seen: list[list[int]] = []

    class Watching(TextsMatcher):
        def accept(self, token_ids: list[int]) -> int:
            seen.append(list(token_ids))
            return super().accept(token_ids)

    harness = Harness(overlap=overlap, prompt_lookup=5)
    harness.grammars.make = Watching
    output = harness.generate("abXY abXY", grammar=choice("abab1", "abab2"), jump_forward=False)
    assert output.text in ("abab1", "abab2")
    assert any(len(run) > 1 for run in seen)


@BOTH_LOOPS
def test_drafts_with_logprobs_stops_and_min_tokens(overlap: bool) -> None:
    bias = {97: 20.0, 98: 19.0}
    for fields in (
        {"logprobs": 1},
        {"stop": ("bab",), "min_tokens": 9},
        {"stop_token_ids": (98,), "min_tokens": 5},
    ):
        plain = Harness().generate("abab", max_tokens=30, logit_bias=bias, **fields)
        drafted = Harness(overlap=overlap, prompt_lookup=4).generate("abab", max_tokens=30, logit_bias=bias, **fields)
        assert (drafted.token_ids, drafted.text, drafted.matched_stop) == (
            plain.token_ids,
            plain.text,
            plain.matched_stop,
        )
        assert drafted.logprobs == plain.logprobs


def test_text_that_does_not_repeat_is_overlapped_again() -> None:
    harness = Harness(overlap=True, prompt_lookup=4)
    output = harness.generate("no repetition", max_tokens=100, ignore_eos=True)
    assert list(output.token_ids) == greedy("no repetition", 100)
    device = [b for b in harness.executor.batches if b.token_ids[0] == -1]
    assert len(device) > 40


def test_drafts_respect_the_limit_and_memory() -> None:
    harness = Harness(prompt_lookup=4, num_pages=24, max_model_len=24)
    ids = [harness.add("ababab" + end, logit_bias={97: 20.0, 98: 19.0}, ignore_eos=True) for end in ("", "a")]
    harness.run()
    for request_id, end in zip(ids, ("", "a"), strict=True):
        expected = Harness(max_model_len=24).generate("ababab" + end, logit_bias={97: 20.0, 98: 19.0}, ignore_eos=True)
        assert harness.output(request_id).token_ids == expected.token_ids
