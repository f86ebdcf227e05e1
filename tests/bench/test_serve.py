"""`sglite bench serve` against a server whose answers are known."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sglite.bench.serve import Load, Report, as_json, make_prompts, measure, plot, summarise, table
from sglite.errors import Overloaded
from sglite.runtime.server.config import ServerConfig
from tests.fakes.core import scripted_engine
from tests.runtime.server.conftest import Live

WORDS = "abcdefgh"


@pytest.fixture
def server() -> Iterator[Live]:
    # Every fourth prompt is refused after it was taken in.
    calls = iter(range(1000))
    engine = scripted_engine(lambda request, index: Overloaded("full") if next(calls) % 4 == 3 else WORDS, step_s=0.002)
    live = Live(engine, ServerConfig(log_requests=False))
    yield live
    live.stop()
    engine.close()


async def test_tokens_times_and_failures_are_counted(server: Live) -> None:
    load = Load(users=4, requests=8, prompt_words=3, max_tokens=8)
    report = await measure(f"{server.url}/v1", load, name="ours")
    assert (report.requests, report.failed) == (8, 2)
    assert report.output_tokens == 6 * len(WORDS)
    assert 0 < report.percentiles["ttft"]["p50"] <= report.percentiles["e2e"]["p50"]
    assert report.percentiles["itl"]["p50"] > 0
    assert "ours" in table([report])
    assert '"failed": 2' in as_json([report], load, {})


def test_prompts_differ_behind_what_they_share_and_come_again() -> None:
    load = Load(requests=5, prompt_words=10, shared_words=4)
    prompts = make_prompts(load)
    assert prompts == make_prompts(load)
    assert len(set(prompts)) == 5
    assert len({" ".join(prompt.split()[:4]) for prompt in prompts}) == 1


def test_a_report_is_drawn(tmp_path: Path) -> None:
    reports: list[Report] = [summarise(name, [], 1.0) for name in ("a", "b")]
    plot(reports, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
