"""Requests that continue one which has not ended."""

from __future__ import annotations

import pytest

from sglite.errors import InvalidRequest, Overloaded
from sglite.protocol import FinishReason, GenerateRequest, ScoreOutput, ScoreRequest
from sglite.runtime.followers import Followers
from tests.runtime.harness import Harness, greedy


def leading(harness: Harness, request_id: str = "a", **fields: object) -> str:
    return harness.add("once", request_id, hold=True, **({"max_tokens": 5, "ignore_eos": True} | fields))


def following(harness: Harness, request_id: str, leader: str, text: str = " more", **fields: object) -> str:
    return harness.add(
        text, request_id, continue_from=leader, **({"max_tokens": 4, "ignore_eos": True, "stream": False} | fields)
    )


@pytest.mark.parametrize("overlap", [False, True])
def test_a_follower_begins_when_its_leader_has_ended_and_answers_as_if_it_had_been_asked_then(overlap: bool) -> None:
    harness = Harness(overlap=overlap)
    leading(harness)
    harness.step()
    following(harness, "b", "a")
    harness.run()
    written = greedy("once", 5)
    whole = [*b"once", *written, *b" more"]
    output = harness.output("b")
    assert output.token_ids == tuple(greedy(whole, 4))
    assert output.prompt_token_ids == tuple(whole)
    assert (harness.core.metrics.admissions, harness.core.metrics.resumptions) == (1, 1)


def test_no_step_lies_between_a_leader_and_its_followers() -> None:
    harness = Harness()
    leading(harness)
    following(harness, "b", "a", hold=True)
    following(harness, "c", "b", " still")
    harness.run()
    assert harness.core.metrics.steps == 5 + 4 + 4
    told = harness.output("c").timing
    assert told is not None and told.steps == 4, "what it waited for its leader is not its own time"


def test_the_device_has_the_followers_step_before_anybody_hears_of_the_leaders_answer() -> None:
    harness = Harness(overlap=True)
    leading(harness)
    following(harness, "b", "a")
    while not harness.pieces("a") or not harness.pieces("a")[-1].finished:
        harness.step()
    assert harness.core.metrics.steps == 5 + 1
    harness.run()
    assert harness.output("b").token_ids == tuple(greedy([*b"once", *greedy("once", 5), *b" more"], 4))


def test_several_follow_one_leader() -> None:
    harness = Harness(overlap=True)
    leading(harness)
    for name in "bcd":
        following(harness, name, "a", f" {name}")
    harness.run()
    for name in "bcd":
        expected = greedy([*b"once", *greedy("once", 5), *f" {name}".encode()], 4)
        assert harness.output(name).token_ids == tuple(expected)


def test_a_scoring_follows() -> None:
    harness = Harness()
    leading(harness)
    request = ScoreRequest(request_id="s", prompt=tuple(b" or"), continuations=((97,), (98,)), continue_from="a")
    harness.core.add(request)
    harness.run()
    scored = next(o for o in harness.outputs if isinstance(o, ScoreOutput))
    apart = Harness().score([*b"once", *greedy("once", 5), *b" or"], [(97,), (98,)])
    assert scored.logprobs == apart.logprobs


def test_followers_of_a_leader_that_is_aborted_are_refused_with_what_to_do() -> None:
    harness = Harness()
    leading(harness)
    following(harness, "b", "a", hold=True)
    following(harness, "c", "b")
    harness.step()
    harness.core.abort("a")
    harness.run()
    harness.step()
    for name in "bc":
        error = harness.output(name).error
        assert error is not None
        made = error.to_exception()
        assert isinstance(made, InvalidRequest) and made.param == "continue_from"
    assert not harness.core.has_work


def test_a_follower_can_be_aborted_while_it_waits() -> None:
    harness = Harness()
    leading(harness)
    following(harness, "b", "a")
    harness.core.abort("b")
    harness.run()
    assert harness.output("b").finish_reason is FinishReason.ABORT
    assert harness.output("a").finish_reason is FinishReason.LENGTH


def test_who_does_not_hold_its_row_has_no_followers() -> None:
    harness = Harness()
    harness.add("once", "a", max_tokens=5)
    with pytest.raises(InvalidRequest, match="holds no row"):
        following(harness, "b", "a")


def test_a_follower_counts_as_waiting_and_its_id_is_taken() -> None:
    harness = Harness(max_waiting=2)
    leading(harness)
    following(harness, "b", "a")
    with pytest.raises(InvalidRequest, match="running already"):
        following(harness, "b", "a")
    with pytest.raises(Overloaded):
        following(harness, "c", "a")


def test_what_is_wrong_with_a_follower_is_found_at_the_end_of_its_leader_and_is_its_own() -> None:
    harness = Harness(max_model_len=20)
    leading(harness)
    following(harness, "b", "a", "x" * 30)
    harness.run()
    error = harness.output("b").error
    assert error is not None and "shorten" in str(error.to_exception())
    assert harness.output("a").finish_reason is FinishReason.LENGTH


def test_followers_are_kept_by_leader_in_order() -> None:
    def made(name: str, leader: str) -> GenerateRequest:
        return GenerateRequest(request_id=name, prompt="", continue_from=leader)

    followers = Followers()
    for name, leader in (("b", "a"), ("c", "a"), ("d", "x")):
        followers.add(made(name, leader))
    assert followers.remove("nobody") is None
    removed = followers.remove("d")
    assert removed is not None and removed.request_id == "d"
    assert [r.request_id for r in followers.take("a")] == ["b", "c"]
    assert len(followers) == 0 and not followers.take("x")


def test_a_deadline_passes_while_a_follower_waits() -> None:
    harness = Harness()
    leading(harness, max_tokens=40)
    following(harness, "b", "a", deadline=-1.0)
    harness.step()
    assert harness.output("b").finish_reason is FinishReason.ABORT
    assert harness.core.next_deadline is None
    harness.run()
    assert harness.output("a").token_ids == tuple(greedy("once", 40))
