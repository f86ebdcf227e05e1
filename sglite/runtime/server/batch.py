"""Offline use of the server's endpoints: a file of OpenAI batch lines in, one line an answer out.

    in    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
    out   {"id": ..., "custom_id": "a", "response": {"status_code": 200, ..., "body": {...}}, "error": null}

Every answer is on disk as soon as it is there, in the order in which they end. A run that was interrupted, or whose
machine lost power, is continued by the same command: what the output file answers is not asked again, and a last line
that was cut is dropped.
"""

from __future__ import annotations

import asyncio
import json
import os
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx
from starlette.types import ASGIApp

from sglite.errors import InvalidRequest

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
SYNC_S = 1.0  # how often what was written is forced to the disk


@dataclass(frozen=True, slots=True)
class BatchLine:
    number: int  # from 1
    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass(slots=True)
class BatchCounts:
    total: int = 0
    done: int = 0  # in this run
    failed: int = 0  # of those, with another status than 200
    before: int = 0  # answered by an earlier run


async def run_batch(
    app: ASGIApp,
    source: Path,
    target: Path,
    *,
    concurrency: int,
    on_progress: Callable[[BatchCounts], None] = lambda counts: None,
) -> BatchCounts:
    """Answer every line of `source` that `target` does not answer yet. Raises InvalidRequest for a malformed source,
    before anything is asked."""
    answered = recover(target)
    counts = BatchCounts(total=check(source), before=len(answered))
    todo = (line for line in read_lines(source) if line.custom_id not in answered)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    with target.open("ab") as out:
        writer = _Writer(out)
        async with httpx.AsyncClient(transport=transport, base_url="http://batch", timeout=None) as client:

            async def work() -> None:
                for line in todo:  # one generator for all workers: a line is read when somebody is free for it
                    status = await _answer(client, line, writer)
                    counts.done += 1
                    counts.failed += status != 200
                    on_progress(counts)

            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(concurrency):
                        group.create_task(work())
            finally:
                writer.sync()
    return counts


def read_lines(source: Path) -> Iterator[BatchLine]:
    """Raises InvalidRequest with the line's number."""
    with source.open(encoding="utf-8") as file:
        for number, text in enumerate(file, 1):
            if text.strip():
                yield _line(number, text)


def check(source: Path) -> int:
    """How many requests there are. Raises InvalidRequest for a line that is none, and for a custom_id used twice."""
    seen: set[str] = set()
    for line in read_lines(source):
        if line.custom_id in seen:
            raise InvalidRequest(f"{source}:{line.number}: custom_id {line.custom_id!r} is used twice")
        seen.add(line.custom_id)
    return len(seen)


def recover(target: Path) -> set[str]:
    """The custom_ids that `target` answers. A last line without its end is cut off: its writer was interrupted."""
    answered: set[str] = set()
    if not target.exists():
        return answered
    whole = 0
    with target.open("rb") as file:
        for raw in file:
            if not raw.endswith(b"\n"):
                break
            try:
                answered.add(json.loads(raw)["custom_id"])
            except (ValueError, KeyError, TypeError) as error:
                raise InvalidRequest(f"{target} is not the output of a batch: {error}") from error
            whole += len(raw)
    if whole < target.stat().st_size:
        os.truncate(target, whole)
    return answered


def _line(number: int, text: str) -> BatchLine:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"line {number} is not JSON: {error}") from error
    if not isinstance(value, dict) or not isinstance(value.get("body"), dict):
        raise InvalidRequest(f"line {number} needs an object with custom_id, url and body")
    custom_id, url = value.get("custom_id"), value.get("url")
    if not isinstance(custom_id, str) or not custom_id:
        raise InvalidRequest(f"line {number} needs a custom_id")
    if url not in URLS:
        raise InvalidRequest(f"line {number}: url must be one of {', '.join(URLS)}")
    if value.get("method", "POST") != "POST":
        raise InvalidRequest(f"line {number}: method must be POST")
    return BatchLine(number, custom_id, url, {**value["body"], "stream": False})


async def _answer(client: httpx.AsyncClient, line: BatchLine, writer: _Writer) -> int:
    response = await client.post(line.url, json=line.body)
    writer.write(
        {
            "id": f"batch_req_{uuid.uuid4().hex}",
            "custom_id": line.custom_id,
            "response": {
                "status_code": response.status_code,
                "request_id": response.headers.get("x-request-id", ""),
                "body": response.json(),
            },
            "error": None,
        }
    )
    return response.status_code


class _Writer:
    """Whole lines, handed to the system at once and forced to the disk about every SYNC_S."""

    def __init__(self, out: IO[bytes]) -> None:
        self._out = out
        self._synced = 0.0

    def write(self, value: dict[str, Any]) -> None:
        self._out.write(json.dumps(value, ensure_ascii=False).encode() + b"\n")
        self._out.flush()
        now = asyncio.get_running_loop().time()
        if now - self._synced > SYNC_S:
            self._synced = now
            self.sync()

    def sync(self) -> None:
        self._out.flush()
        os.fsync(self._out.fileno())
