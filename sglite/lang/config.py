"""What holds for all programs of a process unless a call says otherwise: the default backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglite.errors import ProgramSyntaxError
from sglite.lang.client import Client
from sglite.lang.timeline import Timeline


@dataclass
class GlobalConfig:
    """SGLang's name for it; `set_default_backend` writes here, and nothing else does."""

    default_backend: Client | None = None
    timelines: list[Timeline] | None = None  # `sglite trace`: every run is recorded here


global_config = GlobalConfig()


def unwrap(backend: Any) -> Client:
    """The client of a backend; a `Runtime` carries it as `endpoint`."""
    client = getattr(backend, "endpoint", None) or backend
    if not hasattr(client, "stream_request"):
        name = type(backend).__name__
        raise ProgramSyntaxError(f"{name} is not a backend; use sglite.Engine, RuntimeEndpoint or OpenAI")
    return client


def client_or_default(backend: Any) -> Client:
    """Raises ProgramSyntaxError where there is neither."""
    if backend is not None:
        return unwrap(backend)
    if global_config.default_backend is None:
        raise ProgramSyntaxError(
            "no backend to run on: call sglite.set_default_backend(sglite.Engine(model='smollm2')) first, "
            "or pass backend=..."
        )
    return global_config.default_backend
