"""The FastAPI application over an engine. Nothing here knows whether the engine is a thread, a process or a test's."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, FastAPI
from starlette.middleware.cors import CORSMiddleware

from sglite._version import __version__
from sglite.runtime.server import errors
from sglite.runtime.server.config import ServerConfig
from sglite.runtime.server.middleware import Perimeter
from sglite.runtime.server.routes import ROUTERS
from sglite.runtime.server.service import ServedEngine, Service


def create_app(engine: ServedEngine, config: ServerConfig, *, more: Sequence[APIRouter] = ()) -> FastAPI:
    """`more`: routes of what lies above the runtime. Raises InvalidRequest for a configuration that is not safe."""
    config.check()
    app = FastAPI(title="sglite", version=__version__, description="An OpenAI-compatible server for LLM programs.")
    app.state.service = Service(engine, config)
    app.state.service.more_paths = _paths(more)
    errors.install(app, paths=_paths((*more, *ROUTERS)))
    for router in (*more, *ROUTERS):
        app.include_router(router)
    app.add_middleware(Perimeter, config=config)
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type", "x-api-key", "x-request-id"],
            expose_headers=["x-request-id"],
        )
    return app


def _paths(routers: Sequence[APIRouter]) -> frozenset[str]:
    return frozenset(getattr(route, "path", "") for router in routers for route in router.routes)
