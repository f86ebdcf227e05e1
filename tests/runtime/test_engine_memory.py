from __future__ import annotations

import numpy as np
import pytest

from sglite.errors import InvalidRequest
from sglite.protocol import FinishReason, ProgramRef, ScoreRequest
from sglite.runtime.cache.radix_tree import Namespace
from tests.fakes.matcher import choice
from tests.runtime.harness import Harness, greedy

BOTH_LOOPS = pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
BOTH_PAGE_SIZES = pytest.mark.parametrize(("page_size", "num_pages"), [(1, 64), (16, 4)])


@BOTH_LOOPS
@BOTH_PAGE_SIZES
def test_a_retracted_stream_goes_on_token_by_token(overlap: bool, page_size: int, num_pages: int) -> None:  # R82
    harness = Harness(overlap=overlap, page_size=page_size, num_pages=num_pages, max_model_len=64)
    ids = [harness.add(f"{i} long stream", max_tokens=45, ignore_eos=True) for i in range(2)]
    harness.run()
    assert harness.core.metrics.retractions > 0
    for i, request_id in enumerate(ids):
        output = harness.output(request_id)
        assert list(output.token_ids) == greedy(f"{i} long stream", 45)
        assert output.finish_reason is FinishReason.LENGTH
        assert output.usage.completion_tokens == 45


@BOTH_LOOPS
def test_a_retracted_row_keeps_its_matcher(overlap: bool) -> None:
    spec = choice("x" * 40 + "1", "x" * 40 + "2", "y" * 40)
    harness = Harness(overlap=overlap, num_pages=64, max_model_len=64)
    first = harness.add("first one", max_tokens=50, ignore_eos=True)
    second = harness.add("second one", grammar=spec, jump_forward=False)
    harness.run()
    assert harness.core.metrics.retractions > 0
    assert list(harness.output(first).token_ids) == greedy("first one", 50)
    assert harness.output(second).text == Harness().generate("second one", grammar=spec).text


@BOTH_LOOPS
@BOTH_PAGE_SIZES
def test_the_last_request_ends_with_an_error_when_memory_is_full(
    overlap: bool, page_size: int, num_pages: int
) -> None:  # R83
    harness = Harness(overlap=overlap, page_size=page_size, num_pages=num_pages, max_model_len=512)
    alone = harness.add("p" * 10, max_tokens=100, ignore_eos=True)
    harness.run()
    output = harness.output(alone)
    assert output.finish_reason is FinishReason.ERROR
    assert output.error.type == "OutOfPages"
    assert list(output.token_ids) == greedy("p" * 10, len(output.token_ids))
    assert len(output.token_ids) == 64 - 10 + 1
    assert list(harness.generate("next", max_tokens=3, ignore_eos=True).token_ids) == greedy("next", 3)


@BOTH_LOOPS
def test_an_output_that_just_fits_is_finished(overlap: bool) -> None:
    harness = Harness(overlap=overlap, num_pages=64, max_model_len=512)
    output = harness.generate("p" * 10, max_tokens=55, ignore_eos=True)
    assert output.finish_reason is FinishReason.LENGTH
    stop = greedy("p" * 10, 55)[-1]
    assert stop not in greedy("p" * 10, 54)
    output = harness.generate("p" * 10, max_tokens=99, ignore_eos=True, stop_token_ids=(stop,))
    assert output.finish_reason is FinishReason.STOP


@BOTH_LOOPS
def test_prefixes_that_end_within_a_page_are_counted_once(overlap: bool) -> None:  # R97, R99
    harness = Harness(overlap=overlap, page_size=16, num_pages=32, max_step_tokens=32)
    for n in (15, 16, 17, 33):
        for end in ("", "a", "b"):
            harness.add("c" * n + end, max_tokens=20, ignore_eos=True)
    harness.run()
    metrics = harness.core.metrics
    assert metrics.pages_owned == metrics.pages_protected == 0
    assert metrics.pages_free + metrics.pages_cached == 32


def test_a_failed_check_is_logged_and_kills_nobody(caplog: pytest.LogCaptureFixture) -> None:  # R97
    harness = Harness(check_invariants=True)
    request_id = harness.add("x", max_tokens=3, ignore_eos=True)
    harness.core._cache.num_owned += 1
    while harness.core.has_work:
        harness.outputs += harness.core.step()
    assert list(harness.output(request_id).token_ids) == greedy("x", 3)
    assert harness.core.metrics.accounting_problems > 0
    assert "page accounting" in caplog.text


# -- held rows


@BOTH_LOOPS
@BOTH_PAGE_SIZES
def test_a_held_row_goes_on_with_appended_tokens(overlap: bool, page_size: int, num_pages: int) -> None:
    harness = Harness(overlap=overlap, page_size=page_size, num_pages=2 * num_pages)
    first = harness.add("tell me", max_tokens=20, ignore_eos=True, hold=True)
    harness.run()
    tokens = [*b"tell me", *harness.output(first).token_ids]
    before = harness.executor.computed_tokens
    second = harness.add(" more", max_tokens=5, ignore_eos=True, continue_from=first)
    harness.run()
    output = harness.output(second)
    assert list(output.prompt_token_ids) == [*tokens, *b" more"]
    assert list(output.token_ids) == greedy([*tokens, *b" more"], 5)
    assert harness.core.metrics.resumptions == 1
    computed = harness.executor.computed_tokens - before
    assert computed <= 1 + 5 + 4 + (0 if page_size == 1 else 15)
    harness.core.release(first)
    harness.core.release(second)
    harness.core.release("nobody")
    harness.run()


def test_a_held_row_continues_after_what_the_client_has() -> None:
    harness = Harness()
    output = harness.generate("go", request_id="h", max_tokens=9, hold=True, logit_bias={257: 100.0})
    assert output.token_ids == ()
    harness.generate("", request_id="i", continue_from="h", max_tokens=3, ignore_eos=True)
    assert list(harness.output("i").token_ids) == greedy("go", 3)


@BOTH_LOOPS
def test_a_resumed_row_heals_what_was_appended(overlap: bool) -> None:
    harness = Harness(overlap=overlap)
    harness.generate("tell me", request_id="t", max_tokens=5, ignore_eos=True, hold=True)
    tokens = [*b"tell me", *harness.output("t").token_ids, *b"a story"]
    output = harness.generate("a story", continue_from="t", heal=True, max_tokens=4, ignore_eos=True)
    assert list(output.prompt_token_ids) == tokens[:-1]
    assert list(output.token_ids) == [ord("y"), *greedy(tokens, 4)]
    assert harness.core.metrics.resumptions == 1


@BOTH_LOOPS
def test_a_held_row_may_go_on_from_before_its_end(overlap: bool) -> None:
    harness = Harness(overlap=overlap)
    harness.generate("tell me", request_id="t", max_tokens=9, ignore_eos=True, hold=True)
    tokens = [*b"tell me", *harness.output("t").token_ids][:12]
    output = harness.generate("!", continue_from="t", keep=12, max_tokens=4, ignore_eos=True)
    assert list(output.prompt_token_ids) == [*tokens, ord("!")]
    assert list(output.token_ids) == greedy([*tokens, ord("!")], 4)
    assert output.usage.cached_tokens == 12
    assert harness.core.metrics.resumptions == 1
    with pytest.raises(InvalidRequest, match="keep"):
        harness.add("x", continue_from="t", keep=17)


@BOTH_LOOPS
def test_a_scoring_goes_on_from_a_row_and_hands_it_on(overlap: bool) -> None:
    harness = Harness(overlap=overlap)
    harness.generate("tell me", request_id="t", max_tokens=5, ignore_eos=True, hold=True)
    tokens = [*b"tell me", *harness.output("t").token_ids]
    alone = Harness().score([*tokens, ord(":")], [b"yes", b"no", b"yet"])
    harness.core.add(
        ScoreRequest(
            request_id="s",
            prompt=tuple(b":"),
            continuations=tuple(map(tuple, (b"yes", b"no", b"yet"))),
            continue_from="t",
            hold=True,
        )
    )
    harness.run()
    scored = next(o for o in harness.outputs if o.request_id == "s")
    assert scored.logprobs == alone.logprobs
    assert harness.core.metrics.admissions == 1  # its other rows come with the first
    output = harness.generate("yes", continue_from="s", max_tokens=3, ignore_eos=True)
    assert list(output.token_ids) == greedy([*tokens, *b":yes"], 3)
    assert harness.core.metrics.resumptions == 2
    harness.core.release("s")
    harness.core.release("t")


def test_what_a_program_leased_goes_first_when_it_is_over() -> None:
    harness = Harness(num_pages=64, max_model_len=64)
    for name in ("old", "new"):
        ref = ProgramRef(program_id=name, arrival=1.0 if name == "old" else 2.0, wanted_again=-1)
        harness.generate(name * 7, max_tokens=3, ignore_eos=True, program=ref)
    harness.core.end_program("old")
    harness.core.end_program("nobody")
    harness.generate("other" * 6, max_tokens=2, ignore_eos=True)
    match = harness.core._cache.match_length
    assert match(Namespace(), np.frombuffer(b"new" * 7, np.uint8).astype(np.int32)) == 21
    assert match(Namespace(), np.frombuffer(b"old" * 7, np.uint8).astype(np.int32)) < 21


def test_a_young_program_waits_for_the_memory_of_older_ones_and_a_stranger_does_not() -> None:
    harness = Harness(num_pages=64, max_model_len=64, max_rows=8)
    ref = ProgramRef(program_id="old", arrival=1.0, wanted_again=-1)
    harness.generate("o" * 30, max_tokens=3, ignore_eos=True, program=ref)
    harness.add("r", max_tokens=20, ignore_eos=True)
    harness.step()
    young = harness.add("y" * 40, max_tokens=2, program=ProgramRef(program_id="young", arrival=2.0))
    for _ in range(5):
        harness.step()
    assert not harness.pieces(young)
    stranger = harness.add("s" * 40, max_tokens=2, ignore_eos=True)
    for _ in range(3):
        harness.step()
    assert harness.output(stranger).finished
    harness.run()
    assert harness.output(young).finished


def test_several_requests_may_branch_off_one_held_row() -> None:
    harness = Harness()
    harness.generate("trunk", request_id="t", max_tokens=10, ignore_eos=True, hold=True)
    tokens = [*b"trunk", *harness.output("t").token_ids]
    ids = [harness.add(end, continue_from="t", max_tokens=4, ignore_eos=True) for end in ("a", "b", "c")]
    harness.run()
    for request_id, end in zip(ids, ("a", "b", "c"), strict=True):
        assert list(harness.output(request_id).token_ids) == greedy([*tokens, ord(end)], 4)
        assert harness.output(request_id).usage.cached_tokens >= len(tokens) - 1


@BOTH_LOOPS
def test_a_resumed_row_waits_for_nobody(overlap: bool) -> None:
    harness = Harness(overlap=overlap, max_rows=2)
    harness.generate("chat", request_id="c", max_tokens=3, ignore_eos=True, hold=True)
    for i in range(4):
        harness.add(f"{i} busy", max_tokens=60, ignore_eos=True)
    for _ in range(3):
        harness.step()
    resumed = harness.add("!", continue_from="c", max_tokens=2, ignore_eos=True)
    for _ in range(6):
        harness.step()
    assert any(o.finished for o in harness.pieces(resumed))


def test_held_rows_give_way_when_all_rows_are_held() -> None:
    harness = Harness(max_rows=2)
    for i in range(2):
        harness.generate(f"held {i}", request_id=f"h{i}", max_tokens=2, ignore_eos=True, hold=True)
    assert list(harness.generate("other", max_tokens=3, ignore_eos=True).token_ids) == greedy("other", 3)
    tokens = [*b"held 0", *harness.output("h0").token_ids]
    output = harness.generate("+", continue_from="h0", max_tokens=2, ignore_eos=True)
    assert list(output.token_ids) == greedy([*tokens, ord("+")], 2)


def test_held_pages_give_way_when_memory_is_short() -> None:
    harness = Harness(num_pages=64, max_model_len=64)
    harness.generate("h" * 30, request_id="h", max_tokens=5, ignore_eos=True, hold=True)
    assert list(harness.generate("other", max_tokens=50, ignore_eos=True).token_ids) == greedy("other", 50)


def test_resumed_rows_that_lock_all_memory_take_turns() -> None:
    harness = Harness(num_pages=64, max_model_len=64)
    for i in range(2):
        harness.generate(f"{i}" * 25, request_id=f"h{i}", max_tokens=4, ignore_eos=True, hold=True)
    ids = [harness.add("x" * 20, continue_from=f"h{i}", max_tokens=5, ignore_eos=True) for i in range(2)]
    harness.run()
    for i, request_id in enumerate(ids):
        prompt = [*(b"%d" % i * 25), *harness.output(f"h{i}").token_ids, *(b"x" * 20)]
        assert list(harness.output(request_id).token_ids) == greedy(prompt, 5)


def test_waiting_rows_give_their_memory_to_the_one_that_runs() -> None:
    harness = Harness(num_pages=100, max_model_len=96)
    for i in range(3):
        ref = ProgramRef(program_id=f"p{i}", arrival=1.0 + i, wanted_again=-1)
        harness.generate(f"{i}" * 25, request_id=f"h{i}", max_tokens=4, ignore_eos=True, hold=True, program=ref)
    ids = [
        harness.add(
            "x",
            continue_from=f"h{i}",
            max_tokens=60,
            ignore_eos=True,
            program=ProgramRef(program_id=f"p{i}", arrival=1.0 + i, wanted_again=-1),
        )
        for i in range(3)
    ]
    harness.run()
    for i, request_id in enumerate(ids):
        prompt = [*(b"%d" % i * 25), *harness.output(f"h{i}").token_ids, ord("x")]
        assert list(harness.output(request_id).token_ids) == greedy(prompt, 60)


def test_a_held_row_expires() -> None:
    now = [0.0]
    harness = Harness(clock=lambda: now[0], hold_s=5.0)
    harness.generate("x", request_id="h", max_tokens=2, hold=True)
    assert harness.core.metrics.held == 1
    now[0] = 6.0
    harness.step()
    assert harness.core.metrics.held == 0
    with pytest.raises(InvalidRequest, match="whole"):
        harness.add("more", continue_from="h")


# -- what memory is used for


@BOTH_LOOPS
def test_less_than_a_hundredth_of_the_room_that_rows_hold_is_unused(overlap: bool) -> None:
    harness = Harness(overlap=overlap, num_pages=4000, max_rows=12, max_step_tokens=256)
    for i in range(24):
        harness.add([i] * 64, max_tokens=128, ignore_eos=True)
    harness.run()
    metrics = harness.core.metrics
    assert metrics.retractions == 0
    assert 0.99 < metrics.computed_token_steps / metrics.held_token_steps <= 1.0
    assert metrics.stale_tokens == 0, "an end that is known by its length is known beforehand"


@BOTH_LOOPS
def test_nobody_is_retracted_while_the_cache_could_give_pages(overlap: bool) -> None:
    harness = Harness(overlap=overlap, num_pages=400, max_rows=4, max_model_len=128)
    for i in range(40):  # each leaves 60 pages in the cache
        harness.add([i] * 20, max_tokens=40, ignore_eos=True)
    harness.run()
    metrics = harness.core.metrics
    assert metrics.evicted_pages > 0, "the cache was full"
    assert metrics.retractions == 0
