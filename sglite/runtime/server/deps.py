"""What routes ask for by type. All of it is `async`: FastAPI would call plain functions on threads."""

from __future__ import annotations

import math
from typing import Annotated

from fastapi import Depends, Request

from sglite.errors import InvalidRequest
from sglite.runtime.server.auth import Tenant, require_admin
from sglite.runtime.server.service import Call, Service


async def this_service(request: Request) -> Service:
    return request.app.state.service


async def _tenant(request: Request) -> Tenant:
    return request.state.tenant


async def _admin(request: Request) -> Tenant:
    tenant = await _tenant(request)
    require_admin(tenant)
    return tenant


async def this_call(request: Request) -> Call:
    service = await this_service(request)
    timeout = _timeout(request.headers.get("x-request-timeout"))
    return service.call(request.state.tenant, request.state.record, timeout_s=timeout)


def _timeout(given: str | None) -> float | None:
    """Seconds that the client allows. Raises InvalidRequest."""
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise InvalidRequest(f"X-Request-Timeout is a number of seconds, not {given[:40]!r}", param="x-request-timeout")
    return seconds


ServiceDep = Annotated[Service, Depends(this_service)]
TenantDep = Annotated[Tenant, Depends(_tenant)]
AdminDep = Annotated[Tenant, Depends(_admin)]
CallDep = Annotated[Call, Depends(this_call)]
