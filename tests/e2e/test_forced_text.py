"""Text that a grammar forces is the same however it enters: drawn under its mask, at once, behind drafts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import sglite as sgl
from sglite.bench.structured.cases import CALLS, KEYS
from sglite.bench.structured.real import RECORDS, _letter
from sglite.grammar import spec
from sglite.protocol import RequestOutput

pytestmark = pytest.mark.model

PROMPTS = [f"Write record number {i} about {topic} as JSON:\n" for i, topic in enumerate(("a lamp", "Ada", "rain"))]


def answers(engine: sgl.Engine) -> list[RequestOutput]:
    """Of all rows in one batch."""
    sampling = {"temperature": 0, "max_tokens": 60}
    asked = [(prompt, schema["items"]) for schema in (KEYS, CALLS) for prompt in PROMPTS]
    asked.append((_letter(seed=1), RECORDS))

    async def together() -> list[RequestOutput]:
        return await asyncio.gather(
            *[engine.generate_async(prompt, sampling, constraint=spec.json_schema(schema)) for prompt, schema in asked]
        )

    return asyncio.run(together())


@pytest.fixture(scope="module")
def drawn() -> list[RequestOutput]:
    with sgl.Engine(model="smollm2", overlap=False, jump_forward=False) as engine:
        return answers(engine)


@pytest.mark.parametrize(
    "options", [{"overlap": False}, {"overlap": True}, {"overlap": True, "prompt_lookup": 8}], ids=str
)
def test_forced_text_and_drafts_change_no_token(drawn: list[RequestOutput], options: dict[str, Any]) -> None:
    with sgl.Engine(model="smollm2", check_invariants=True, **options) as engine:
        answers(engine)
        found = answers(engine)  # what is forced where is known by now
        stats = engine.stats()
    assert stats["accounting_problems"] == 0
    assert [output.token_ids for output in found] == [output.token_ids for output in drawn]
    assert [output.text for output in found] == [output.text for output in drawn]
    assert not any(output.usage.forced_tokens for output in drawn)
    forced = sum(output.usage.forced_tokens for output in found)
    assert forced > 0.25 * sum(output.usage.completion_tokens for output in found)
    assert bool(stats["guessed_runs"]) == (options == {"overlap": True})
    if "prompt_lookup" in options:
        assert stats["accepted_draft_tokens"] > 10
