"""`sglite serve`: an OpenAI-compatible server for one model."""

from __future__ import annotations

import dataclasses
from typing import Any

from sglite.cli.config_options import built, option_parameters, with_options
from sglite.runtime.config import EngineConfig
from sglite.runtime.server.config import Limits, ServerConfig

# The server has its own of these: what waits is bounded before it reaches the engine.
_ENGINE_SKIPS = ("max_waiting", "served_name")


@with_options(
    [
        *option_parameters(EngineConfig, skip=_ENGINE_SKIPS),
        *option_parameters(ServerConfig, flags={"api_keys": "--api-key", "cors_origins": "--cors-origin"}),
        *option_parameters(Limits),
    ]
)
def command(**values: Any) -> None:
    """Serve a model over an OpenAI-compatible HTTP API."""
    from sglite import serve_programs  # FastAPI and uvicorn: not for `sglite serve --help`
    from sglite.runtime.server.run import serve

    engine_values = {name: value for name, value in values.items() if name not in _ENGINE_SKIPS}
    config = dataclasses.replace(built(ServerConfig, values), limits=built(Limits, values))
    serve(built(EngineConfig, engine_values), config, more=[serve_programs.router])
