"""An exception in a step ends the requests of that step; nobody reads what it may have left half written."""

from __future__ import annotations

import pytest

from sglite.errors import EngineDead
from sglite.protocol import FinishReason
from sglite.runtime.engine import MAX_FAILED_STEPS
from tests.runtime.harness import Harness, greedy

BOTH_LOOPS = pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])


@BOTH_LOOPS
@pytest.mark.parametrize("phase", ["forward", "sample", "wait"])
@pytest.mark.parametrize("step", [1, 2, 4])
def test_a_failed_step_ends_its_requests_and_the_loop_goes_on(overlap: bool, phase: str, step: int) -> None:
    harness = Harness(overlap=overlap)
    harness.executor.fail_on[phase].add(step)
    ids = [harness.add(f"{i} in the step", max_tokens=10, ignore_eos=True) for i in range(2)]
    harness.step()
    later = harness.add("0 in the step after", max_tokens=10, ignore_eos=True)
    harness.run()
    assert harness.core.metrics.failed_steps == 1
    for i, request_id in enumerate(ids):
        output = harness.output(request_id)
        assert output.finish_reason is FinishReason.ERROR
        assert "scripted" in output.error.message
        assert list(output.token_ids) == greedy(f"{i} in the step", len(output.token_ids))
    if harness.output(later).finish_reason is not FinishReason.ERROR:
        assert list(harness.output(later).token_ids) == greedy("0 in the step after", 10)
    fresh = harness.generate("0 in the step", max_tokens=10, ignore_eos=True)
    assert list(fresh.token_ids) == greedy("0 in the step", 10)


def test_who_shares_wrong_kv_starts_over() -> None:
    harness = Harness(overlap=True, max_step_tokens=32)
    harness.executor.fail_on["wait"].add(1)
    first = harness.add("a shared beginning", max_tokens=5, ignore_eos=True)
    harness.step()  # step 1 is on the device: its KV will turn out wrong
    sharing = harness.add("a shared beginning, then more", max_tokens=5, ignore_eos=True, prompt_logprobs=None)
    harness.run()
    assert harness.output(first).finish_reason is FinishReason.ERROR
    assert list(harness.output(sharing).token_ids) == greedy("a shared beginning, then more", 5)


def _until_retraction(fail_at: int | None) -> tuple[Harness, list[str]]:
    harness = Harness(overlap=True, num_pages=64, max_model_len=64)
    harness.executor.fail_on["wait"] = set() if fail_at is None else {fail_at}
    ids = [harness.add(f"{i} long stream", max_tokens=45, ignore_eos=True) for i in range(2)]
    while not harness.core.metrics.retractions:
        harness.step()
    return harness, ids


def test_wrong_kv_of_a_retracted_row_is_not_matched_later() -> None:
    under_way = _until_retraction(None)[0].core.metrics.steps - 1
    harness, ids = _until_retraction(under_way)
    harness.run()
    for i, request_id in enumerate(ids):
        assert harness.output(request_id).finish_reason is FinishReason.ERROR
        tokens = [*f"{i} long stream".encode(), *greedy(f"{i} long stream", 40)]
        again = harness.generate(tokens, max_tokens=5, ignore_eos=True)
        assert list(again.token_ids) == greedy(tokens, 5)


@BOTH_LOOPS
def test_a_row_whose_sampling_fails_ends_alone(overlap: bool) -> None:
    harness = Harness(overlap=overlap)
    harness.executor.bad_rows.add(3)
    bad = harness.add("bad", max_tokens=10, ignore_eos=True)
    good = harness.add("good", max_tokens=10, ignore_eos=True)
    harness.run()
    assert harness.output(bad).finish_reason is FinishReason.ERROR
    assert "NaN" in harness.output(bad).error.message
    assert list(harness.output(good).token_ids) == greedy("good", 10)


@BOTH_LOOPS
def test_an_executor_that_only_fails_ends_the_engine(overlap: bool) -> None:
    harness = Harness(overlap=overlap)
    harness.executor.fail_on["forward"] = set(range(1, 5)) | set(range(6, 100))
    for i in range(4):
        assert harness.generate(f"{i}", max_tokens=1).finish_reason is FinishReason.ERROR
    assert harness.generate("works", max_tokens=1).finish_reason is FinishReason.LENGTH  # the count begins again
    for i in range(MAX_FAILED_STEPS):
        assert harness.generate(f"{i}", max_tokens=1).finish_reason is FinishReason.ERROR
    harness.add("nobody answers")
    with pytest.raises(EngineDead, match="steps in a row failed"):
        harness.run()
