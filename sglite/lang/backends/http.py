"""HTTP to a remote backend: one connection pool for each event loop, and the remote's errors as errors of our tree."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import httpx

from sglite.errors import BackendError, InvalidRequest, Overloaded, SgliteError, UnsupportedSchema, error_types
from sglite.lang.backends.wire import Broken, Fed, Wires, reaches

CONNECT_S = 10.0
CLOSE_S = 1.0  # for what is under way when a backend is closed
MAX_ERROR_CHARS = 500
_ANSWERS = (200, 401, 403, 429)  # below 500, what a server of the right kind says to a question for its model
_PAGE = re.compile(r"<(!doctype html|html|head|body)\b", re.IGNORECASE)
_TITLE = re.compile(r"<title[^>]*>(.*?)</title>", re.IGNORECASE | re.DOTALL)


class Unreachable(BackendError):
    """The connection failed or broke: nothing was said."""


class NotThisApi(BackendError):
    """Something answers, and not as a server of this API does."""


@dataclass(slots=True)
class _Pool:
    client: httpx.AsyncClient
    wires: Wires | None = None  # None: there is a proxy between
    in_use: int = 0  # requests under way

    async def close(self) -> None:
        """Not under a request that ends soon: it would give its connection back to a pool that is closed, open."""
        until = time.monotonic() + CLOSE_S
        while self.in_use and time.monotonic() < until:
            await asyncio.sleep(0.005)
        if self.wires is not None:
            self.wires.close()
        await self.client.aclose()


class Http:
    """JSON over HTTP. `verify`: as httpx takes it (False: do not check certificates). Raises InvalidRequest for a
    `base_url` that does not say how it is spoken to."""

    def __init__(self, base_url: str, *, api_key: str | None, timeout_s: float, verify: Any = True) -> None:
        if not base_url.lower().startswith(("http://", "https://")):
            raise InvalidRequest(f"{base_url!r} is no URL; write http://{base_url} or https://...", param="base_url")
        self.base_url = base_url.rstrip("/")
        self._headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._timeout = httpx.Timeout(timeout_s, connect=CONNECT_S)
        self._verify = verify
        self._closed = False
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, _Pool] = WeakKeyDictionary()
        self._finalizer = weakref.finalize(self, _close, self._clients)  # for those who do not call close

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self._closed = True
        self._finalizer()

    def get_now(self, path: str) -> Any:
        """Without an event loop. Raises NotThisApi, BackendError and what the remote says."""
        try:
            answer = httpx.get(self.base_url + path, headers=self._headers, timeout=self._timeout, verify=self._verify)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        if answer.status_code < 500 and (answer.status_code not in _ANSWERS or _page(answer.content)):
            said = f"{answer.status_code} {answer.reason_phrase}".strip()
            raise NotThisApi(f"GET {path} was answered with {said}: {_shown(answer.content)}")
        return _checked(answer, answer.content)

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Raises BackendError and what the remote says."""
        answer = await self._posted(path, body)
        return _checked(answer, answer.content)

    async def tell(self, path: str, body: Mapping[str, Any]) -> None:
        """As `post`, where the answer's body says nothing and need not be JSON."""
        answer = await self._posted(path, body)
        if answer.status_code != 200:
            _checked(answer, answer.content)

    async def _posted(self, path: str, body: Mapping[str, Any]) -> httpx.Response:
        try:
            with self._client() as client:
                return await client.post(path, json=body)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    async def delete(self, path: str) -> None:
        """Raises BackendError and what the remote says."""
        try:
            with self._client() as client:
                answer = await client.delete(path)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        if answer.status_code != 200:
            _checked(answer, answer.content)

    async def events(self, path: str, body: Mapping[str, Any] | bytes) -> AsyncGenerator[Any]:
        """The JSON of each server-sent event. `body`: JSON, or bytes of it. Raises as `post`; an event that holds an
        error is raised too."""
        given: dict[str, Any] = {"content": body} if isinstance(body, bytes) else {"json": body}
        try:
            async with self._streamed(path, given) as answer:
                if answer.status_code != 200 or "application/json" in answer.headers.get("content-type", ""):
                    _checked(answer, await answer.aread())
                    raise BackendError("the backend answered with something else than a stream")
                lines = answer.aiter_lines()
                async for line in lines:
                    data = line.removeprefix("data:").strip()
                    if not line.startswith("data:") or not data:
                        continue
                    if data == "[DONE]":
                        await _drained(lines)
                        return
                    yield _good(_parsed(data))
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    async def pour(self, path: str, body: bytes, fed: Fed, *, closing: bool = False) -> None:
        """POST, and hand the bytes of the answer to `fed` as they come; returns at its end. Raises as `post`, and what
        `fed` raises. `closing`: also after `close`, while there are connections."""
        with self._pool(closing=closing) as pool:
            if pool.wires is None:
                await self._poured(path, body, fed, closing=closing)
                return
            try:
                answer = await pool.wires.post(path, body, fed)
            except Broken as error:
                raise Unreachable(f"{self.base_url} does not answer: {error}") from error
        if answer.status_code != 200:
            _checked(answer, answer.content)

    async def _poured(self, path: str, body: bytes, fed: Fed, *, closing: bool) -> None:
        try:
            async with self._streamed(path, {"content": body}, closing=closing) as answer:
                if answer.status_code != 200:
                    _checked(answer, await answer.aread())
                async for chunk in answer.aiter_raw():
                    fed(chunk)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    @contextlib.asynccontextmanager
    async def _streamed(
        self, path: str, given: dict[str, Any], *, closing: bool = False
    ) -> AsyncGenerator[httpx.Response]:
        with self._client(closing=closing) as client:
            async with client.stream("POST", path, **given) as answer:
                yield answer

    @contextlib.contextmanager
    def _client(self, *, closing: bool = False) -> Iterator[httpx.AsyncClient]:
        with self._pool(closing=closing) as pool:
            yield pool.client

    @contextlib.contextmanager
    def _pool(self, *, closing: bool = False) -> Iterator[_Pool]:
        """A pool belongs to the event loop that opened its connections. Raises BackendError after `close`."""
        loop = asyncio.get_running_loop()
        pool = self._clients.get(loop)
        if self._closed and (pool is None or not closing):
            raise BackendError(f"this backend has been closed: make a new one for {self.base_url}")
        if pool is None:
            pool = self._clients[loop] = self._new_pool()
        pool.in_use += 1
        try:
            yield pool
        finally:
            pool.in_use -= 1

    def _new_pool(self) -> _Pool:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        client = httpx.AsyncClient(
            base_url=self.base_url,
            headers=self._headers,
            timeout=self._timeout,
            verify=self._verify,
            limits=limits,
        )
        url = httpx.URL(self.base_url)
        if not reaches(url):
            return _Pool(client)
        return _Pool(client, Wires(url, self._headers, verify=self._verify, timeout=self._timeout))

    def _unreachable(self, error: httpx.HTTPError) -> Unreachable:
        return Unreachable(f"{self.base_url} does not answer: {error or type(error).__name__}")


async def _drained(lines: AsyncIterator[str]) -> None:
    """To the stream's end, which is near: only a connection that was read to its end is used again."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1.0):
            async for _ in lines:
                pass


def _close(pools: WeakKeyDictionary[asyncio.AbstractEventLoop, _Pool]) -> None:
    """Each pool is closed by the loop that uses it; one whose loop is over has nothing open any more."""
    for loop, pool in list(pools.items()):
        if loop.is_running():
            loop.call_soon_threadsafe(lambda loop=loop, pool=pool: loop.create_task(pool.close()))


def error_of(body: Any, *, status: int, retry_after: float = 1.0) -> SgliteError:
    """The error that a body like {"message": ..., "code": ...} stands for."""
    found: Mapping[str, Any] = body if isinstance(body, Mapping) else {"message": str(body)}
    message = str(found.get("message") or found)[:MAX_ERROR_CHARS]
    if status in (429, 503):
        return Overloaded(f"the backend is overloaded: {message}", retry_after=retry_after)
    code = found.get("code")
    if code == UnsupportedSchema.code and found.get("keyword"):
        return UnsupportedSchema(message, pointer=str(found.get("pointer", "")), keyword=str(found["keyword"]))
    for cls in error_types().values():
        if cls.code == code and cls.status == status and cls is not UnsupportedSchema:
            return cls(message, param=found.get("param"))
    return BackendError(f"the backend answered {status}: {message}", param=found.get("param"))


@contextlib.contextmanager
def known_shape() -> Iterator[None]:
    """Around the reading of an answer. Raises BackendError where it is not what the API's answers look like."""
    try:
        yield
    except SgliteError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RecursionError, OSError) as error:
        raise BackendError(f"the backend's answer is in an unknown shape: {type(error).__name__}: {error}") from error


def _parsed(content: bytes | str) -> Any:
    """Raises BackendError for what is not JSON."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise BackendError(f"the backend's answer is not JSON: {_shown(content)}") from error


def _good(body: Any) -> Any:
    """Raises the error that an answer with status 200 may hold."""
    error = body.get("error") if isinstance(body, dict) else None
    if error is None:
        return body
    status = error.get("status") if isinstance(error, dict) else None
    raise error_of(error, status=status if isinstance(status, int) else 500)


def _checked(answer: httpx.Response, content: bytes) -> Any:
    if answer.status_code == 200:
        return _good(_parsed(content))
    try:
        body = json.loads(content) if content else None
    except (ValueError, RecursionError):
        body = _shown(content)
    given = answer.headers.get("retry-after", "")
    retry_after = float(given) if given.replace(".", "", 1).isdigit() else 1.0
    error = body.get("error", body) if isinstance(body, dict) else body
    raise error_of(error, status=answer.status_code, retry_after=retry_after)


def _shown(content: bytes | str) -> str:
    """What to show of an answer that is not JSON: a page of a proxy or of another server by its title."""
    page = _page(content)
    if page is not None:
        title = _TITLE.search(page)
        return f"an HTML page, {' '.join(title[1].split())!r}" if title else "an HTML page"
    text = _text(content) or "nothing"
    return text if len(text) <= MAX_ERROR_CHARS else text[:MAX_ERROR_CHARS] + "..."


def _page(content: bytes | str) -> str | None:
    """The text where it is HTML."""
    text = _text(content)
    return text if _PAGE.search(text) else None


def _text(content: bytes | str) -> str:
    """As much of it as is looked at."""
    head = content[: 8 * MAX_ERROR_CHARS]
    return (head if isinstance(head, str) else head.decode(errors="replace")).strip()
