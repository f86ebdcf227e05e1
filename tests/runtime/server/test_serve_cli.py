from __future__ import annotations

import socket
from typing import Any

import pytest

from sglite.cli import main
from sglite.errors import InvalidRequest
from sglite.runtime.config import EngineConfig
from sglite.runtime.server import run
from sglite.runtime.server.config import Limits, ServerConfig


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `sglite serve` would have served."""
    found: list[Any] = []
    monkeypatch.setattr(run, "serve", lambda engine, config, more: found.extend([engine, config]))
    return found


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["serve", *arguments])
    return int(ended.value.code or 0)


def test_without_options_it_serves_the_defaults(served: list[Any]) -> None:
    assert call() == 0
    assert served == [EngineConfig(), ServerConfig()]


def test_options_reach_the_engine_the_server_and_the_limits(served: list[Any]) -> None:
    keys = ("--api-key", "key-of-alice", "--api-key", "key-of-bobby")
    assert call("--model", "m", "--max-rows", "7", "--no-prefix-cache", *keys, "--port", "0", "--max-n", "3") == 0
    engine, server = served
    assert engine == EngineConfig(model="m", max_rows=7, prefix_cache=False)
    assert server == ServerConfig(api_keys=("key-of-alice", "key-of-bobby"), port=0, limits=Limits(max_n=3))


def test_an_unsafe_address_is_refused_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--host", "0.0.0.0") == 1
    assert "without an API key" in capsys.readouterr().err


def test_a_port_in_use_is_told_before_the_model_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(InvalidRequest, match="cannot listen"):
            run.bind(ServerConfig(port=taken.getsockname()[1]))


def test_the_engine_has_a_process_of_its_own_where_it_should() -> None:
    assert run.runs_in_process(EngineConfig(device="cuda"), ServerConfig())
    assert not run.runs_in_process(EngineConfig(device="cpu"), ServerConfig())
    assert run.runs_in_process(EngineConfig(device="cpu"), ServerConfig(engine="process"))
    assert not run.runs_in_process(EngineConfig(device="cuda"), ServerConfig(engine="thread"))
