from __future__ import annotations

import numpy as np
import pytest

from sglite.runtime.batch import GREEDY
from sglite.runtime.cache.radix_tree import Namespace
from sglite.runtime.request import Job, Request
from sglite.runtime.scheduler.drafts import PromptLookup, look_up
from tests.fakes.executor import ScriptedExecutor
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


def _request(prompt: list[int]) -> Request:
    n = len(prompt)
    ids = np.zeros(400, np.int32)
    ids[:n] = prompt
    job = Job("r", None, 0.0)
    return Request(job, 0, ids, n, n, 400, 399, samples=True, sampling=GREEDY, namespace=Namespace())


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

    harness = Harness(overlap=overlap, prompt_lookup=4)
    harness.grammars.make = Watching
    spec = choice("abcdefghijkl1", "abcdefghijkl2")
    output = harness.generate("abcdefghijklXY abcdefghijklXY", grammar=spec, jump_forward=False)
    assert output.text in ("abcdefghijkl1", "abcdefghijkl2")
    assert any(len(run) > 1 for run in seen)
    assert 0 < output.usage.draft_tokens == output.usage.accepted_draft_tokens


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


def test_text_that_does_not_repeat_stays_overlapped() -> None:
    harness = Harness(overlap=True, prompt_lookup=4)
    output = harness.generate("no repetition", max_tokens=100, ignore_eos=True)
    assert list(output.token_ids) == greedy("no repetition", 100)
    assert [b.token_ids[0] for b in harness.executor.batches[1:]] == [-1] * 99
    assert harness.core.metrics.draft_tokens == 0


def test_text_that_repeats_wrongly_is_found_out_without_a_draft() -> None:
    guesses = PromptLookup(max_drafts=4, max_rows=8)
    request = _request([1, 2, 3, 4, 5, 6, 1, 2])
    for token_id in [9, 1, 2] * 50:  # never what followed before
        guesses.watch(request)
        request.append(token_id if token_id != 9 else 100 + request.num_tokens)
    assert guesses.expected([request]) == (0.0, 0)


def test_copied_text_is_found_out_without_a_draft_too() -> None:
    guesses = PromptLookup(max_drafts=4, max_rows=8)
    request = _request([*range(50), 0, 1, 2])
    for token_id in range(3, 15):
        guesses.watch(request)
        request.append(token_id)
    expected, drafts = guesses.expected([request])
    assert expected > 2
    assert drafts == 4
    assert guesses.expected([request] * 9) == (0.0, 0)  # too many rows


@BOTH_LOOPS
def test_drafts_stand_behind_forced_text_in_one_step(overlap: bool) -> None:
    text = '{"a":"xyxyxyxy","b":"xyxyxyxy","c":"xyxyxyxy"}'
    spec = choice(text, *(text.replace("y", other) for other in "uvw"))
    slow = Harness().generate("xyxyxyxy", grammar=spec, jump_forward=False)
    harness = Harness(overlap=overlap, prompt_lookup=4)
    fast = harness.generate("xyxyxyxy", grammar=spec)
    assert fast.text == slow.text
    assert fast.usage.forced_tokens > 8


def test_drafts_respect_the_limit_and_memory() -> None:
    harness = Harness(prompt_lookup=4, num_pages=24, max_model_len=24)
    ids = [harness.add("ababab" + end, logit_bias={97: 20.0, 98: 19.0}, ignore_eos=True) for end in ("", "a")]
    harness.run()
    for request_id, end in zip(ids, ("", "a"), strict=True):
        expected = Harness(max_model_len=24).generate("ababab" + end, logit_bias={97: 20.0, 98: 19.0}, ignore_eos=True)
        assert harness.output(request_id).token_ids == expected.token_ids


def test_no_draft_is_made_for_a_step_that_the_device_is_not_ready_for() -> None:
    class Unready(ScriptedExecutor):
        def step_seconds(self, num_rows: int, num_tokens: int) -> float | None:
            return None if num_tokens > num_rows + 2 else 0.0

    for overlap in (False, True):
        harness = Harness(executor=Unready(overlaps=overlap), overlap=overlap, prompt_lookup=4)
        harness.generate("ababab", max_tokens=60, logit_bias={97: 20.0, 98: 19.0}, ignore_eos=True)
        assert max(int(batch.num_drafts.max()) for batch in harness.executor.batches) <= 2
