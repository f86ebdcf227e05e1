"""Whatever the OpenAPI document allows, and what it does not: every request gets an answer, and never a 500."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode

from sglite.runtime.async_engine import Engine
from sglite.runtime.server.app import create_app
from sglite.runtime.server.config import Limits, ServerConfig
from tests.fakes.core import scripted_engine

PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/generate",
    "/tokenize",
    "/detokenize",
    "/abort_request",
)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with scripted_engine(lambda request, index: "hello") as made:
        yield made


@pytest.fixture(scope="module")
def api(engine: Engine) -> Any:
    config = ServerConfig(request_timeout_s=10, limits=Limits(max_n=2, max_prompts=2), log_requests=False)
    return schemathesis.openapi.from_asgi("/openapi.json", create_app(engine, config))


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize("path", PATHS)
def test_no_request_breaks_the_server(api: Any, engine: Engine, path: str, mode: GenerationMode) -> None:
    _fuzz(api[path]["POST"].as_strategy(generation_mode=mode))
    assert engine.generate("a").text == "hello"


def _fuzz(cases: Any) -> None:
    @settings(max_examples=6, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(case=cases)
    def every(case: Any) -> None:
        response = case.call()
        assert response.status_code < 500, (response.status_code, response.text[:500])

    every()


def test_the_paths_of_this_test_are_all_that_take_something(api: Any) -> None:
    posts = {op.ok().path for op in api.get_all_operations() if op.ok().method.upper() == "POST"}
    assert posts - set(PATHS) == {"/v1/embeddings", "/flush_cache"}
