"""What a recorded run should have cost, and that every workload makes the same tokens both ways."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sglite.bench.programs.price import critical_path, hit_rates, least_tokens, needed_steps
from sglite.bench.programs.record import Call, Warmed
from sglite.bench.programs.shapes import Shape, Texts
from sglite.bench.programs.stands import WAYS, EngineStand
from sglite.bench.programs.workloads import WORKLOADS, workload
from sglite.protocol import Timing, Usage
from sglite.runtime.async_engine import Engine
from tests.fakes.tiny_folder import tiny_folder


def call(
    program: str,
    submitted: float,
    finished: float,
    prompt: str,
    *answers: str,
    cached: int = 0,
    generates: bool = True,
    steps: int = 1,
    step_s: float = 1.0,
    admitted: float | None = None,
) -> Call:
    return Call(
        program,
        submitted,
        finished,
        tuple(prompt.encode()),
        tuple(tuple(a.encode()) for a in answers),
        generates,
        Usage(prompt_tokens=len(prompt), cached_tokens=cached, completion_tokens=len(answers[0]) if generates else 0),
        Timing(
            arrived=submitted,
            admitted=submitted if admitted is None else admitted,
            finished=finished,
            steps=steps,
            step_s=step_s,
        ),
    )


def test_a_call_needs_a_step_for_each_piece_of_its_prompt_and_each_further_token() -> None:
    assert needed_steps(call("p", 0, 1, "x" * 10, "abc"), chunk=100) == 3
    assert needed_steps(call("p", 0, 1, "x" * 10, "abc", cached=9), chunk=100) == 3
    assert needed_steps(call("p", 0, 1, "x" * 10, "a", cached=0), chunk=4) == 3
    assert needed_steps(call("p", 0, 1, "x" * 10, "ab", "cd", generates=False), chunk=100) == 1


def test_the_path_is_the_longest_chain_and_costs_what_steps_cost() -> None:
    calls = [
        call("p", 0.0, 2.0, "a", "xx", steps=4, step_s=2.0),  # 2 of its 4 steps were needed: 1 s
        call("p", 0.0, 1.0, "b", "x", step_s=1.0),
        call("p", 2.1, 4.0, "axx", "yyy", steps=3, step_s=1.5),  # waited for the first
        call("q", 0.0, 3.9, "c", "z", step_s=9.0),  # another program, beside it
    ]
    path = critical_path(calls, chunk=100)
    assert (path.calls, path.steps, path.program) == (2, 5, "p")
    assert path.seconds == pytest.approx(1.0 + 1.5)
    assert critical_path([], chunk=100).seconds == 0.0


def test_a_program_that_waited_for_its_turn_comes_behind_another_one() -> None:
    calls = [call("p", 0.0, 1.0, "a", "x"), call("q", 1.001, 2.0, "b", "x")]
    assert critical_path(calls, chunk=100).calls == 2


def test_tokens_and_hits_are_counted_against_what_could_have_been() -> None:
    calls = [
        call("p", 0.5, 1.0, "abcd", "ef"),
        call("p", 1.0, 2.0, "abcdef!", "g", cached=5),  # the last of "ef" was not computed
        call("p", 2.0, 3.0, "abcdef!", "xy", "xz", cached=6, generates=False),
    ]
    assert least_tokens(calls) == 5 + 2 + 1
    found, best = hit_rates(calls, [], capacity=100)
    asked = 4 + 7 + 7
    assert (found, best) == (pytest.approx((5 + 6) / asked), pytest.approx((5 + 6) / asked))
    assert hit_rates(calls, [], capacity=3)[1] < best
    assert hit_rates(calls, [Warmed(-2.0, -1.0, tuple(b"ab"))], capacity=100)[1] == pytest.approx((2 + 5 + 6) / asked)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tiny_folder(tmp_path_factory.mktemp("tiny"))
    with Engine(model=str(folder), load_format="dummy", device="cpu", num_pages=8000, max_rows=32) as made:
        yield made


@pytest.mark.parametrize("name", WORKLOADS)
def test_programs_make_the_calls_that_loose_ones_make_and_compute_each_token_once(engine: Engine, name: str) -> None:
    texts = Texts(engine.tokenizer, Shape(scale=0.12, pause_scale=0.001, share=0.02))
    load = workload(name, texts)
    arguments = load.arguments(2)
    programs, calls = (EngineStand(engine).run_once(load, arguments, way, 2) for way in WAYS)
    assert sum(c.generates for c in programs.calls) == sum(c.generates for c in calls.calls)
    options = [sum(len(c.answers) for c in way.calls if not c.generates) for way in (programs, calls)]
    assert options[0] == options[1]
    assert programs.counts["admissions"] <= load.branches() * len(arguments) + 2  # two prefixes were warmed
    assert programs.counts["computed_tokens"] <= 1.05 * least_tokens(programs.calls)
