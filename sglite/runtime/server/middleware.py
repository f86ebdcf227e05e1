"""What happens around every request, as one plain ASGI layer (a layer that wraps the stream would hide disconnects).

request id in or made -> key checked -> body bounded -> the route -> one log line -> X-Request-Id out
"""

from __future__ import annotations

import json
import logging
import re
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sglite.errors import SgliteError
from sglite.protocol import Usage
from sglite.runtime.server.auth import PUBLIC_PATHS, Keys, Tenant
from sglite.runtime.server.config import ServerConfig
from sglite.runtime.server.errors import BodyTooLarge, error_response

log = logging.getLogger("sglite.server.access")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(slots=True)
class RequestRecord:
    """What the log line of one request says; the route fills in what it learns."""

    request_id: str
    tenant: Tenant | None = None
    started: float = field(default_factory=time.monotonic)  # time.monotonic() seconds
    status: int = 0
    model: str | None = None
    queue_s: float | None = None
    first_token_s: float | None = None
    usage: Usage | None = None
    finish_reasons: list[str] = field(default_factory=list)
    error: str | None = None

    def line(self, method: str, path: str) -> str:
        known: dict[str, Any] = {
            "request_id": self.request_id,
            "method": method,
            "path": path,
            "status": self.status,
            "tenant": self.tenant.name if self.tenant else None,
            "total_ms": _ms(time.monotonic() - self.started),
            "queue_ms": _ms(self.queue_s),
            "first_token_ms": _ms(self.first_token_s),
            "finish_reasons": self.finish_reasons or None,
            "error": self.error,
        }
        if self.usage is not None:
            known["prompt_tokens"] = self.usage.prompt_tokens
            known["cached_tokens"] = self.usage.cached_tokens
            known["completion_tokens"] = self.usage.completion_tokens
            known["forced_tokens"] = self.usage.forced_tokens
        return json.dumps({key: value for key, value in known.items() if value is not None})


class Perimeter:
    """The layer of this module."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._config = config
        self._keys = Keys(config)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        record = RequestRecord(_request_id(headers))
        scope.setdefault("state", {})["record"] = record

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = record.request_id
            await send(message)

        try:
            await self._admit(scope, headers, record)
        except SgliteError as error:
            record.error = error.code
            await error_response(error, scope["path"])(scope, receive, send_marked)
        else:
            await self._app(scope, self._bounded(receive), send_marked)
        finally:
            if self._config.log_requests and scope["path"] not in PUBLIC_PATHS:
                log.info(record.line(scope["method"], scope["path"]))

    async def _admit(self, scope: Scope, headers: Headers, record: RequestRecord) -> None:
        if scope["path"] not in PUBLIC_PATHS:
            record.tenant = self._keys.tenant(headers)
        scope["state"]["tenant"] = record.tenant
        announced = headers.get("content-length", "0")
        if announced.isdigit() and int(announced) > self._config.limits.max_body_bytes:
            raise _too_large(self._config.limits.max_body_bytes)

    def _bounded(self, receive: Receive) -> Receive:
        left = self._config.limits.max_body_bytes

        async def bounded() -> Message:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                # An HTTPException, because the framework turns any other error while reading a body into a 400.
                raise HTTPException(413, _too_large(self._config.limits.max_body_bytes).message)
            return message

        return bounded


def _request_id(headers: Headers) -> str:
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the request body is larger than {limit} bytes")


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 1)
