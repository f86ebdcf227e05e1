"""What routes ask for by type."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from sglite.runtime.server.auth import Tenant, require_admin
from sglite.runtime.server.middleware import RequestRecord
from sglite.runtime.server.service import Call, Service


def _service(request: Request) -> Service:
    return request.app.state.service


def _record(request: Request) -> RequestRecord:
    return request.state.record


def _tenant(request: Request) -> Tenant:
    return request.state.tenant


def _admin(request: Request) -> Tenant:
    tenant = _tenant(request)
    require_admin(tenant)
    return tenant


def _call(request: Request) -> Call:
    return _service(request).call(_tenant(request), _record(request))


ServiceDep = Annotated[Service, Depends(_service)]
TenantDep = Annotated[Tenant, Depends(_tenant)]
AdminDep = Annotated[Tenant, Depends(_admin)]
CallDep = Annotated[Call, Depends(_call)]
