"""Forced text that matchers take without looking at it again enters for all rows at once, and changes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from sglite.protocol import RequestOutput
from tests.fakes.executor import ScriptedExecutor
from tests.fakes.matcher import TextsMatcher, choice
from tests.runtime.harness import Harness

RECORDS = [
    f'{{"first_key":{a},"second_key":{b},"third_key":{c},"end":{a}{b}}}' for a in "abc" for b in "abc" for c in "ab"
]


@dataclass(frozen=True)
class Run:
    tokens: tuple[int, ...]


class RunMatcher(TextsMatcher):
    """Knows its runs, but for the one to the end."""

    taken_at_once = 0

    def known_run(self) -> Run | None:
        run = tuple(self.forced())
        twin = self.fork()
        assert twin.accept(run) == len(run)
        return Run(run) if run and not twin.finished else None

    def take_run(self, run: Any) -> None:
        assert list(run.tokens) == self.forced()
        assert self.accept(run.tokens) == len(run.tokens)
        RunMatcher.taken_at_once += 1


class TimedExecutor(ScriptedExecutor):
    """Whose steps take so long, it says, that turns pay, or so short that they do not."""

    def __init__(self, seconds: float) -> None:
        super().__init__(overlaps=True)
        self._seconds = seconds

    def step_seconds(self, num_rows: int, num_tokens: int) -> float | None:
        return self._seconds


def answers(harness: Harness, **fields: Any) -> list[RequestOutput]:
    ids = [harness.add(f"{i}", grammar=choice(*RECORDS), **fields) for i in range(9)]
    harness.run()
    return [harness.output(request_id) for request_id in ids]


def drawn() -> list[RequestOutput]:
    return answers(Harness(), jump_forward=False)


@pytest.mark.parametrize("way", ["plain", "overlapped", "in turns"])
@pytest.mark.parametrize("stream", [False, True])
def test_runs_taken_at_once_are_those_taken_one_by_one(way: str, stream: bool) -> None:
    options: dict[str, Any] = {"overlap": way != "plain"}
    if way != "plain":
        options["executor"] = TimedExecutor(10.0 if way == "in turns" else 1e-9)
    harness = Harness(**options)
    harness.grammars.make = RunMatcher
    before = RunMatcher.taken_at_once
    for _ in range(3):
        for output, expected in zip(answers(harness, stream=stream), drawn(), strict=True):
            assert output.token_ids == expected.token_ids
            assert output.text == expected.text
            assert output.finish_reason == expected.finish_reason
            assert output.usage.completion_tokens == len(output.token_ids)
            assert output.usage.forced_tokens > 30
    assert RunMatcher.taken_at_once > before + 20


def test_a_run_that_reaches_the_limit_goes_the_long_way() -> None:
    for limit in range(10, 40):
        harness = Harness(executor=TimedExecutor(10.0), overlap=True)
        harness.grammars.make = RunMatcher
        for output in answers(harness, max_tokens=limit):
            assert len(output.token_ids) == limit
            assert output.finish_reason == "length"


def test_rows_beside_and_their_pages_are_untouched() -> None:
    harness = Harness(executor=TimedExecutor(10.0), overlap=True, page_size=16, num_pages=64)
    harness.grammars.make = RunMatcher
    free = harness.add("free text", max_tokens=80, ignore_eos=True)
    answers(harness)
    expected = Harness().generate("free text", max_tokens=80, ignore_eos=True)
    assert harness.output(free).token_ids == expected.token_ids
