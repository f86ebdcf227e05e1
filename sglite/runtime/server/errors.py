"""Errors as HTTP answers: the tree of sglite.errors and the framework's own, in OpenAI's or Anthropic's shape.

A text that reaches a client says what to do and nothing of the inside: an error outside the tree becomes a plain
500 whose cause is in the server's log only.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse

from sglite.errors import InvalidRequest, RequestAborted, SgliteError, did_you_mean

log = logging.getLogger("sglite.server")

_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = {
    **_OPENAI_TYPES,
    413: "request_too_large",
    503: "overloaded_error",
    507: "overloaded_error",
}


class Unauthorized(SgliteError):
    status = 401
    code = "invalid_api_key"


class Forbidden(SgliteError):
    status = 403
    code = "forbidden"


class BodyTooLarge(SgliteError):
    status = 413
    code = "body_too_large"


class NotImplementedHere(SgliteError):
    status = 501
    code = "not_implemented"


class DeadlineExceeded(SgliteError):
    status = 504
    code = "deadline_exceeded"


def openai_error(error: SgliteError) -> dict[str, Any]:
    kind = _OPENAI_TYPES.get(error.status) or ("invalid_request_error" if error.status < 500 else "server_error")
    body: dict[str, Any] = {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    for name in ("pointer", "keyword"):
        value = getattr(error, name, None)
        if value is not None:
            body[name] = value
    return {"error": body}


def anthropic_error(error: SgliteError) -> dict[str, Any]:
    kind = _ANTHROPIC_TYPES.get(error.status) or ("invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def error_body(error: SgliteError, path: str) -> dict[str, Any]:
    return anthropic_error(error) if path.startswith("/v1/messages") else openai_error(error)


def error_headers(error: SgliteError) -> dict[str, str]:
    retry_after = getattr(error, "retry_after", None)
    if retry_after is None and error.status == 503:
        retry_after = 1.0
    return {} if retry_after is None else {"retry-after": str(max(1, math.ceil(retry_after)))}


def error_response(error: SgliteError, path: str) -> JSONResponse:
    return JSONResponse(error_body(error, path), status_code=error.status, headers=error_headers(error))


def hidden(error: BaseException) -> SgliteError:
    """What a client may know of an error: itself when it is of the tree, else that something went wrong."""
    if isinstance(error, SgliteError):
        return error
    log.error("unexpected error", exc_info=error)
    return SgliteError("internal error; the server's log has the cause")


def _validation_error(error: RequestValidationError, known: Collection[str]) -> InvalidRequest:
    """`known`: the fields of the body."""
    problems: list[str] = []
    param: str | None = None
    for item in error.errors()[:5]:
        where = ".".join(str(part) for part in item["loc"] if part not in ("body", "query", "path"))
        param = param or (where or None)
        text = str(item["msg"])
        if item["type"] == "json_invalid":  # its place is a number of characters and no field
            position, reason = item["loc"][-1], item["ctx"]["error"]
            return InvalidRequest(f"the body is not JSON: {reason} (at character {position})")
        if not where and item["type"] in ("model_attributes_type", "model_type"):
            text = "the body must be a JSON object, sent with the header content-type: application/json"
        if item["type"] == "extra_forbidden":
            text = f"this server does not know the field; {did_you_mean(where, known) or 'remove it'}"
        problems.append(f"{where}: {text}" if where else text)
    return InvalidRequest("; ".join(problems), param=param)


def install(app: FastAPI, *, paths: Collection[str]) -> None:
    """Answer every error of this app in the shape that the path's clients expect. `paths`: those that it has."""

    async def on_tree(request: Request, error: Exception) -> JSONResponse:
        return error_response(hidden(error), request.url.path)

    async def on_validation(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return error_response(_validation_error(error, _body_fields(request)), request.url.path)

    async def on_http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        missing = error.status_code == 404 and error.detail == "Not Found"  # the framework's own: no route is like that
        answer = SgliteError(_no_such_path(request.url.path, paths) if missing else str(error.detail))
        answer.status = error.status_code
        answer.code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
        response = error_response(answer, request.url.path)
        response.headers.update(_text_headers(error.headers))
        return response

    async def on_leaving(request: Request, error: Exception) -> JSONResponse:
        """While its body was read: nobody sees the answer."""
        return error_response(RequestAborted("the client left"), request.url.path)

    app.add_exception_handler(SgliteError, on_tree)
    app.add_exception_handler(ClientDisconnect, on_leaving)
    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(Exception, on_tree)


def _no_such_path(path: str, known: Collection[str]) -> str:
    meant = f"did you mean /v1{path}?" if f"/v1{path}" in known else did_you_mean(path, known)
    return f"there is no {path[:100]} here; {meant or '/docs lists what there is'}"


def _body_fields(request: Request) -> set[str]:
    route = request.scope.get("route")
    given = [each.field_info.annotation for each in route.dependant.body_params] if isinstance(route, APIRoute) else []
    bodies = [each for each in given if isinstance(each, type) and issubclass(each, BaseModel)]
    return {name for body in bodies for name in body.model_fields}


def _text_headers(headers: Mapping[str, str] | None) -> dict[str, str]:
    return dict(headers or {})
