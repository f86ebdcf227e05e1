"""How bodies are read: JSON that can be said again as UTF-8, whatever part of it an answer or a log repeats."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, HTTPException, Request
from fastapi.routing import APIRoute
from starlette.responses import Response

_SURROGATE = re.compile(rb"\\u[dD][89abAB]|\\u[dD][c-fC-F]")


class _JsonRequest(Request):
    async def json(self) -> Any:
        value = await super().json()
        if _SURROGATE.search(await self.body()):
            try:
                json.dumps(value, ensure_ascii=False).encode()
            except UnicodeEncodeError as error:
                # An HTTPException, because the framework turns any other error while reading a body into its own.
                raise HTTPException(400, "the body holds a lone surrogate, which is no character") from error
        return value


class _JsonRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return handle_json


def make_router() -> APIRouter:
    """What every file under routes/ begins with."""
    return APIRouter(route_class=_JsonRoute)
