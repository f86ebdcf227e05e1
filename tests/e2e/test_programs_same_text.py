"""Every example's text is the same interpreted, compiled, and both ways on a remote server: greedy, in float32."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import sglite as sgl
from sglite import serve_programs
from sglite.lang.backends.sglite_server import RuntimeEndpoint
from sglite.runtime.server.app import create_app
from sglite.runtime.server.config import ServerConfig
from tests.lang.conftest import Served
from tests.lang.test_examples import NAMES, load

pytestmark = pytest.mark.model

# example -> (its program, arguments, options of the run)
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "classify_batch": ("classify", {"review": "It broke after a week."}, {}),
    "json_extraction": ("extract", {"message": "This is Bob. The Quark kettle leaks a little."}, {}),
    "llm_judge": ("judge", {"article": "Cities should plant more trees. Shade lowers the temperature."}, {}),
    "multi_turn_chat": ("chat", {"questions": ["Name a yellow fruit.", "What can I cook with it?"]}, {}),
    "quickstart": ("capital", {"country": "France"}, {}),
    "react_agent": ("react", {"question": "How high is Mount Everest?", "max_turns": 2}, {}),
    "regex_fields": ("booking", {"request": "A table for 4 on the 12th of May 2026 at half past seven."}, {}),
    "skeleton_of_thought": ("skeleton_of_thought", {"question": "How can I sleep better?"}, {}),
    "streaming_program": ("story", {"hero": "a small dragon"}, {}),
    "tree_of_thought": ("tree_of_thought", {"question": "3 pens with 4 hens each?", "max_tokens": 6}, {"seed": 1}),
}


@pytest.fixture(scope="module")
def remote(engine: sgl.Engine) -> Iterator[RuntimeEndpoint]:
    app = create_app(engine, ServerConfig(), more=[serve_programs.router])
    served = Served(app)
    endpoint = RuntimeEndpoint(served.url, tokenizer=engine.tokenizer)
    yield endpoint
    for _ in range(200):  # ends are told beside what a program goes on with
        if not len(app.state.service.program_sessions):
            break
        time.sleep(0.02)
    endpoint.close()
    time.sleep(0.1)
    served.stop()


def test_every_example_is_compared() -> None:
    assert sorted(CASES) == NAMES


@pytest.mark.parametrize("name", CASES)
def test_the_text_does_not_depend_on_where_and_how_a_program_runs(
    name: str, engine: sgl.Engine, remote: RuntimeEndpoint
) -> None:
    program_name, arguments, options = CASES[name]
    program = getattr(load(name), program_name)
    runs = [
        lambda: program.run(**arguments, **options, backend=engine),
        lambda: program.compile(backend=engine).run(**arguments, **options),
        lambda: program.compile(backend=remote).run(**arguments, **options),
        lambda: program.run(**arguments, **options, backend=remote),
    ]
    with ThreadPoolExecutor(len(runs)) as pool:  # side by side: rows of one step cost little more than one
        states = [run.result() for run in [pool.submit(run) for run in runs]]
    interpreted, _, _, again = states
    assert interpreted.text()
    assert [state.text() for state in states] == [interpreted.text()] * len(runs)
    assert again.messages() == interpreted.messages()
