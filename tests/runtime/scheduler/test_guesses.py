"""Forced text that enters behind a token which only the device knows yet changes no text, right or wrong."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from sglite.protocol import RequestOutput
from tests.fakes.executor import ScriptedExecutor
from tests.fakes.matcher import choice
from tests.runtime.harness import Harness
from tests.runtime.scheduler.test_runs import RECORDS, RunMatcher, TimedExecutor


class Said(SimpleNamespace):
    """What is counted at a place."""


class PlacedMatcher(RunMatcher):
    """Its places are how many tokens were taken, so that other texts come to one place, too."""

    places: dict[int, Said] = {}

    @property
    def state(self) -> Any:
        fresh = Said(draws=0, runs=0, hits=0, likely=(), ahead=0, followed=None)
        return SimpleNamespace(said=self.places.setdefault(len(self._taken), fresh))

    def fork(self) -> PlacedMatcher:
        twin = PlacedMatcher((), self._taken)
        twin._texts = self._texts
        return twin


@pytest.fixture(autouse=True)
def new_places() -> None:
    PlacedMatcher.places = {}


class QuickExecutor(ScriptedExecutor):
    """Its steps take so short that no turn pays, it says."""

    def step_seconds(self, num_rows: int, num_tokens: int) -> float | None:
        return 1e-9


def harness(*, num_pages: int = 4096) -> Harness:
    found = Harness(executor=QuickExecutor(num_pages=num_pages, overlaps=True), overlap=True)
    found.grammars.make = PlacedMatcher
    return found


def answers(harness: Harness, texts: list[str] = RECORDS, **fields: Any) -> list[RequestOutput]:
    ids = [harness.add(f"{i}", grammar=choice(*texts), **fields) for i in range(9)]
    harness.run()
    return [harness.output(request_id) for request_id in ids]


NUMBERS = ("1", "12", "21")
UNEVEN = [f'{{"a":{a},"b":{b},"c":{c},"d":{a}}}' for a in NUMBERS for b in NUMBERS for c in NUMBERS]


@pytest.mark.parametrize("texts", [RECORDS, UNEVEN], ids=["alike", "uneven"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_is_the_one_drawn_token_by_token(texts: list[str], stream: bool, temperature: float) -> None:
    fields: dict[str, Any] = {"temperature": temperature, "seed": 3}
    expected = answers(Harness(), texts, jump_forward=False, **fields)
    core = harness()
    for _ in range(3):
        for output, one in zip(answers(core, texts, stream=stream, **fields), expected, strict=True):
            assert (output.token_ids, output.text, output.finish_reason) == (one.token_ids, one.text, one.finish_reason)
            assert output.usage.completion_tokens == len(output.token_ids)
    metrics = core.core.metrics
    assert metrics.guessed_runs > metrics.wrong_guesses
    assert bool(metrics.wrong_guesses) == (texts is UNEVEN)


def test_what_was_guessed_saves_the_step_of_the_first_forced_token() -> None:
    core = harness()
    answers(core)
    before = core.core.metrics.steps
    answers(core)
    guessed = core.core.metrics.steps - before
    others = Harness(executor=TimedExecutor(1e-9), overlap=True)
    others.grammars.make = RunMatcher
    answers(others)
    assert guessed <= others.core.metrics.steps - 2  # text follows two draws of a record, and a third that ends it


def test_every_limit_ends_where_it_should() -> None:
    core = harness()
    answers(core)
    for limit in range(10, 40, 3):
        for output in answers(core, max_tokens=limit):
            assert len(output.token_ids) == limit
            assert output.finish_reason == "length"
    assert core.core.metrics.guessed_runs


def test_pages_that_only_a_guess_wants_are_not_taken_from_others() -> None:
    core = harness(num_pages=120)
    expected = [output.text for output in answers(Harness(), jump_forward=False)]
    for _ in range(3):
        assert [output.text for output in answers(core)] == expected
    assert core.core.metrics.guessed_runs


def test_rows_that_count_their_tokens_wait_for_them() -> None:
    core = harness()
    for _ in range(2):
        answers(core, frequency_penalty=0.5)
    assert not core.core.metrics.guessed_runs


@pytest.mark.parametrize("num_pages", [120, 4096])
def test_rows_that_end_give_their_pages_up_or_come_back_amid_guesses_leave_no_trace(num_pages: int) -> None:
    rng = random.Random(num_pages)
    expected = {output.request_id: output for output in answers(Harness(), UNEVEN, jump_forward=False)}
    for one in expected.values():
        assert one.finish_reason == "grammar"
    core = harness(num_pages=num_pages)
    answers(harness(), UNEVEN)
    for _ in range(6):
        ids = [core.add(f"{i}", grammar=choice(*UNEVEN)) for i in range(9)]
        aborted: set[str] = set()
        while core.core.has_work:
            core.step()
            if rng.random() < 0.3:
                aborted.add(one := rng.choice(ids))
                core.core.abort(one)
        for i, request_id in enumerate(ids):
            output = core.output(request_id)
            if output.finish_reason == "grammar":
                assert output.text == list(expected.values())[i].text
            else:
                assert request_id in aborted
    assert core.core.metrics.guessed_runs and core.core.metrics.wrong_guesses
    assert bool(core.core.metrics.retractions) == (num_pages == 120)
