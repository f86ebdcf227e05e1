"""What is served and how it is: models, health, metrics, facts; and the switches for whoever runs the server."""

from __future__ import annotations

import dataclasses
import platform
from typing import Any

from starlette.responses import JSONResponse, PlainTextResponse, Response

from sglite._version import __version__
from sglite.errors import InvalidRequest
from sglite.runtime.server.body import make_router
from sglite.runtime.server.config import is_loopback
from sglite.runtime.server.deps import AdminDep, ServiceDep, TenantDep
from sglite.runtime.server.errors import NotImplementedHere
from sglite.runtime.server.schemas.generate import AbortBody
from sglite.runtime.server.service import Service

router = make_router()


@router.get("/health")
@router.get("/health_generate")
async def health(service: ServiceDep) -> Response:
    """200 when a token can be generated now."""
    healthy = await service.healthy()
    return JSONResponse({"status": "ok" if healthy else "unhealthy"}, status_code=200 if healthy else 503)


@router.get("/health/ready")
async def ready(service: ServiceDep) -> Response:
    """200 while the server takes requests; cheap."""
    taking = service.engine.alive and service.admission.is_open
    return JSONResponse({"status": "ready" if taking else "not ready"}, status_code=200 if taking else 503)


@router.get("/metrics")
async def metrics(service: ServiceDep) -> Response:
    """Prometheus text."""
    service.metrics.waiting.set(service.admission.waiting)
    service.metrics.running.set(service.admission.running)
    return PlainTextResponse(service.metrics.render(await service.stats()), media_type="text/plain; version=0.0.4")


@router.get("/v1/models")
async def models(service: ServiceDep) -> dict[str, Any]:
    """The one model that is served."""
    return {"object": "list", "data": [_card(service)]}


@router.get("/v1/models/{name:path}")
async def model(name: str, service: ServiceDep) -> dict[str, Any]:
    """The served model by its name."""
    if name != service.model_name:
        error = InvalidRequest(f"there is no model {name[:200]!r} here", param="model")
        error.status, error.code = 404, "model_not_found"
        raise error
    return _card(service)


@router.get("/get_model_info")
async def model_info(service: ServiceDep) -> dict[str, Any]:
    """As SGLang's frontend asks for it."""
    info = service.engine.model_info
    return {
        "model_path": info.name,
        # A folder, for programs on this machine; others need not know how this one is laid out.
        "tokenizer_path": service.engine.facts.get("tokenizer_folder") if is_loopback(service.config.host) else None,
        "server": "sglite",
        "programs": True,  # it keeps the state of programs: /programs
        "graphs": "/programs/run" in service.more_paths,
        "is_generation": True,
        "max_model_len": info.max_model_len,
        "vocab_size": info.vocab_size,
        "has_chat_template": info.has_chat_template,
    }


@router.get("/get_server_info")
async def server_info(service: ServiceDep, tenant: TenantDep) -> dict[str, Any]:
    """Options (no keys among them) and the engine's counters."""
    options = dataclasses.asdict(service.config)
    for secret in ("api_keys", "admin_key"):
        options.pop(secret)
    return {
        "version": __version__,
        "python": platform.python_version(),
        "model": service.model_name,
        "options": options,
        "stats": await service.stats() if tenant.admin else {},
        "waiting": service.admission.waiting,
        "running": service.admission.running,
    }


@router.post("/flush_cache")
@router.get("/flush_cache")
async def flush_cache(service: ServiceDep, admin: AdminDep) -> Response:
    """Drop every cached prefix that no running request uses."""
    emptied = await service.engine.flush_cache()
    return JSONResponse({"emptied": emptied})


@router.post("/abort_request")
async def abort_request(body: AbortBody, service: ServiceDep, tenant: TenantDep) -> dict[str, bool]:
    """End a request of one's own by its id; a no-op for ids that are unknown or over."""
    request_id = body.rid or body.request_id
    if body.abort_all or request_id is None:
        raise InvalidRequest("name one request: rid", param="rid")
    await service.abort(tenant, request_id)
    return {"ok": True}


@router.post("/v1/embeddings")
async def embeddings() -> Response:
    """Not done by the models that run here."""
    raise NotImplementedHere("this server runs generative models; it has no embeddings")


def _card(service: Service) -> dict[str, Any]:
    return {
        "id": service.model_name,
        "object": "model",
        "created": int(service.started),
        "owned_by": "sglite",
        "max_model_len": service.engine.model_info.max_model_len,
    }
