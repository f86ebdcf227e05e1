"""Who calls. Everything needs a key once keys are set, except the paths listed here: a new route is closed by itself.

    no keys set           everybody is one anonymous tenant and may do everything (loopback only, see ServerConfig)
    API keys set          each key is a tenant; admin routes are closed
    admin key set too     the admin key opens everything

A tenant's requests share a cache namespace that no other tenant's requests can hit.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass

from sglite.runtime.server.config import ServerConfig
from sglite.runtime.server.errors import Forbidden, Unauthorized

PUBLIC_PATHS = frozenset({"/health", "/health_generate", "/health/ready"})


@dataclass(frozen=True, slots=True)
class Tenant:
    name: str  # for logs and fair share; tells nothing of the key
    namespace: str  # of the prefix cache
    admin: bool

    def owned(self, request_id: str) -> str:
        """A client's id as the engine's: no tenant can clash with, or abort, another one's."""
        return f"{self.name}:{request_id}"


class Keys:
    """Checks a presented key against all known ones, in a time that does not depend on which one matches."""

    def __init__(self, config: ServerConfig) -> None:
        self._open = not config.api_keys and config.admin_key is None
        self._tenants = [(key.encode(), _tenant(key)) for key in config.api_keys]
        if config.admin_key is not None:
            self._tenants.append((config.admin_key.encode(), Tenant("admin", "admin", True)))

    def tenant(self, headers: Mapping[str, str]) -> Tenant:
        """Raises Unauthorized."""
        if self._open:
            return Tenant("anonymous", "", True)
        presented = _presented(headers).encode()
        found: Tenant | None = None
        for key, tenant in self._tenants:
            if hmac.compare_digest(key, presented):
                found = tenant
        if found is None:
            raise Unauthorized("a valid API key is needed: Authorization: Bearer KEY, or x-api-key: KEY")
        return found


def require_admin(tenant: Tenant) -> None:
    if not tenant.admin:
        raise Forbidden("this route needs the server's admin key")


def _tenant(key: str) -> Tenant:
    digest = hashlib.sha256(b"sglite tenant\0" + key.encode()).hexdigest()
    return Tenant(f"key-{digest[:8]}", f"key-{digest}", False)


def _presented(headers: Mapping[str, str]) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return token.strip()
    return headers.get("x-api-key", "")
