"""Every example runs: over a scripted client here, on the real model under the marker."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import sglite as sgl
from tests.fakes.client import ScriptedClient

FOLDER = Path(__file__).parents[2] / "examples"
NAMES = sorted(file.stem for file in FOLDER.glob("*.py"))


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"examples_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # pydantic looks annotations up there
    spec.loader.exec_module(module)
    return module


def scripted_answer(prompt: str) -> str | None:
    """What the smallest text of the constraint does not do for."""
    for end, answer in (("date: ", "2026-05-12"), ("time: ", "19:30"), ("phone: ", "(555) 123-4567")):
        if prompt.endswith(end):
            return answer
    if re.search(r"Action: finish $", prompt):
        return '{"answer":"8849 metres"}'
    if re.search(r"Action: look_up $", prompt):
        return '{"topic":"Everest"}'
    return None


@pytest.fixture
def scripted() -> Iterator[ScriptedClient]:
    client = ScriptedClient(
        scripted_answer, scores=lambda prompt, option: 0.0 if option.strip() in ("look_up", "positive") else -20.0
    )
    sgl.set_default_backend(client)
    yield client
    sgl.set_default_backend(None)


def test_all_are_known() -> None:
    assert NAMES == [
        "classify_batch",
        "json_extraction",
        "llm_judge",
        "multi_turn_chat",
        "quickstart",
        "react_agent",
        "regex_fields",
        "skeleton_of_thought",
        "streaming_program",
        "tree_of_thought",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_an_example_runs(name: str, scripted: ScriptedClient, capsys: pytest.CaptureFixture[str]) -> None:
    load(name).main()
    assert capsys.readouterr().out
    assert scripted.requests or scripted.score_requests


def test_the_agent_uses_its_tools(scripted: ScriptedClient, capsys: pytest.CaptureFixture[str]) -> None:
    assert load("react_agent").main() == "8849 metres"
    out = capsys.readouterr().out
    assert "Observation: Mount Everest is 8849 metres high." in out


def test_the_tree_has_thirty_thoughts(scripted: ScriptedClient) -> None:
    load("tree_of_thought").main()
    assert len(scripted.requests) == 30
    assert {r.program.siblings for r in scripted.requests if r.program} == {2}


@pytest.mark.model
@pytest.mark.parametrize("name", NAMES)
def test_an_example_runs_on_the_model(name: str, smollm2: Any, capsys: pytest.CaptureFixture[str]) -> None:
    sgl.set_default_backend(smollm2)
    try:
        assert load(name).main()
    finally:
        sgl.set_default_backend(None)
    assert capsys.readouterr().out


@pytest.fixture(scope="module")
def smollm2() -> Iterator[Any]:
    with sgl.Engine(model="smollm2") as engine:
        yield engine
