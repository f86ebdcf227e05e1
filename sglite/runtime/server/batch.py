"""Offline use of the server's endpoints: a file of OpenAI batch lines in, one line an answer out.

    in    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
    out   {"id": ..., "custom_id": "a", "response": {"status_code": 200, ..., "body": {...}}, "error": null}

Every answer is on disk as soon as it is there, in the order in which they end. A run that was interrupted, or whose
machine lost power, is continued by the same command: what the output file answers is not asked again, and a last line
that was cut is dropped.

A line that is no request is answered too, with `"response": null` and what is wrong with it:

    out   {..., "custom_id": null, "response": null, "error": {"code": "invalid_line", "message": ..., "line": 3}}
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


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that is no request, and why."""

    number: int
    custom_id: str | None  # where it has one
    reason: str


@dataclass(slots=True)
class BatchCounts:
    total: int = 0
    done: int = 0  # in this run
    failed: int = 0  # of those, with another status than 200
    invalid: int = 0  # of those, lines that are no requests
    before: int = 0  # answered by an earlier run
    failed_before: int = 0  # of those, with another status than 200


async def run_batch(
    app: ASGIApp,
    source: Path,
    target: Path,
    *,
    concurrency: int,
    on_progress: Callable[[BatchCounts], None] = lambda counts: None,
) -> BatchCounts:
    """Answer every line of `source` that `target` does not answer yet. Raises InvalidRequest for a source without any
    request, before anything is asked."""
    answered = recover(target)
    total = check(source)
    counts = BatchCounts(total=total, before=len(answered), failed_before=sum(not well for well in answered.values()))
    todo = (line for line in read_lines(source) if _key(line) not in answered)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    with target.open("ab") as out:
        writer = _Writer(out)
        async with httpx.AsyncClient(transport=transport, base_url="http://batch", timeout=None) as client:

            async def work() -> None:
                for line in todo:  # one generator for all workers: a line is read when somebody is free for it
                    if isinstance(line, BadLine):
                        writer.write(_refusal(line))
                        counts.invalid += 1
                        counts.failed += 1
                    else:
                        status = await _answer(client, line, writer)
                        counts.failed += status != 200
                    counts.done += 1
                    on_progress(counts)

            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(concurrency):
                        group.create_task(work())
            finally:
                writer.sync()
    return counts


def read_lines(source: Path) -> Iterator[BatchLine | BadLine]:
    """Blank lines are skipped; the second use of a custom_id is a BadLine."""
    seen: set[str] = set()
    with source.open("rb") as file:
        for number, text in enumerate(file, 1):
            if not text.strip():
                continue
            line = _line(number, text)
            if isinstance(line, BatchLine) and line.custom_id in seen:
                line = BadLine(number, line.custom_id, f"custom_id {line.custom_id!r} is used twice")
            if isinstance(line, BatchLine):
                seen.add(line.custom_id)
            yield line


def check(source: Path) -> int:
    """How many lines there are to answer. Raises InvalidRequest where none of them is a request: it is another file."""
    total, first_bad = 0, None
    requests = False
    for line in read_lines(source):
        total += 1
        requests = requests or isinstance(line, BatchLine)
        if first_bad is None and isinstance(line, BadLine):
            first_bad = line
    if not requests:
        why = "it is empty" if first_bad is None else f"line {first_bad.number}: {first_bad.reason}"
        raise InvalidRequest(f"{source} holds no request; {why}")
    return total


def recover(target: Path) -> dict[str | int, bool]:
    """What `target` answers: custom_ids, and the numbers of lines that are no requests; whether with status 200. A last
    line without its end is cut off: its writer was interrupted."""
    answered: dict[str | int, bool] = {}
    if not target.exists():
        return answered
    whole = 0
    with target.open("rb") as file:
        for raw in file:
            if not raw.endswith(b"\n"):
                break
            try:
                value = json.loads(raw)
                if value.get("error"):
                    answered[value["error"]["line"]] = False
                else:
                    answered[value["custom_id"]] = value["response"]["status_code"] == 200
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise InvalidRequest(f"{target} is not the output of a batch: {error}") from error
            whole += len(raw)
    if whole < target.stat().st_size:
        os.truncate(target, whole)
    return answered


def _line(number: int, text: bytes) -> BatchLine | BadLine:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return BadLine(number, None, f"it is not JSON: {error}")
    if not isinstance(value, dict):
        return BadLine(number, None, "it needs an object with custom_id, url and body")
    custom_id, url = value.get("custom_id"), value.get("url")
    if not isinstance(custom_id, str) or not custom_id:
        return BadLine(number, None, "it needs a custom_id")
    if not isinstance(value.get("body"), dict):
        return BadLine(number, custom_id, "it needs an object with custom_id, url and body")
    if url not in URLS:
        return BadLine(number, custom_id, f"url must be one of {', '.join(URLS)}")
    if value.get("method", "POST") != "POST":
        return BadLine(number, custom_id, "method must be POST")
    return BatchLine(number, custom_id, url, {**value["body"], "stream": False})


def _key(line: BatchLine | BadLine) -> str | int:
    return line.custom_id if isinstance(line, BatchLine) else line.number


def _refusal(line: BadLine) -> dict[str, Any]:
    return {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": line.custom_id,
        "response": None,
        "error": {"code": "invalid_line", "message": f"line {line.number}: {line.reason}", "line": line.number},
    }


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
