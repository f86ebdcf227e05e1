from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from sglite.errors import InvalidRequest
from sglite.protocol import GenerateRequest
from sglite.runtime.server.batch import check, read_lines, recover, run_batch
from tests.runtime.server.conftest import MakeClient


def write(path: Path, bodies: list[dict[str, Any]]) -> Path:
    lines = [
        {"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": b} for i, b in enumerate(bodies)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def answers(path: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["custom_id"] for line in lines}) == len(lines)
    return {line["custom_id"]: line["response"] for line in lines}


async def test_every_line_is_answered_once_errors_too(serve: MakeClient, tmp_path: Path) -> None:
    client = serve()
    source = write(tmp_path / "in.jsonl", [{"prompt": f"p{i}"} for i in range(20)] + [{"prompt": "x", "n": 10**6}])
    target = tmp_path / "out.jsonl"
    counts = await run_batch(client.app, source, target, concurrency=4)  # type: ignore[attr-defined]
    assert (counts.total, counts.done, counts.failed, counts.before) == (21, 21, 1, 0)
    found = answers(target)
    assert [found[f"r{i}"]["body"]["choices"][0]["text"] for i in range(20)] == [f"p{i}" for i in range(20)]
    assert found["r20"]["status_code"] == 400
    again = await run_batch(client.app, source, target, concurrency=4)  # type: ignore[attr-defined]
    assert (again.done, again.before, again.failed_before) == (0, 21, 1)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [])
    with pytest.raises(InvalidRequest, match="holds no request; it is empty"):
        check(source)


async def test_an_interrupted_run_is_continued(serve: MakeClient, tmp_path: Path) -> None:
    def slow(request: GenerateRequest, index: int) -> str:
        return "x" * (3 if len(request.prompt) == 1 else 50_000)

    client = serve(slow, step_s=0.001)
    source = write(
        tmp_path / "in.jsonl", [{"prompt": "a", "max_tokens": 100_000}] * 5 + [{"prompt": "bb", "max_tokens": 100_000}]
    )
    target = tmp_path / "out.jsonl"
    task = asyncio.ensure_future(run_batch(client.app, source, target, concurrency=6))  # type: ignore[attr-defined]
    while not target.exists() or len(target.read_text().splitlines()) < 5:
        await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(answers(target)) == [f"r{i}" for i in range(5)]
    with target.open("ab") as file:
        file.write(b'{"id": "cut in the mid')
    assert recover(target) == {f"r{i}": True for i in range(5)}
    client.core.script = lambda request, index: "done"  # type: ignore[attr-defined]
    counts = await run_batch(client.app, source, target, concurrency=6)  # type: ignore[attr-defined]
    assert (counts.before, counts.done) == (5, 1)
    assert answers(target)["r5"]["body"]["choices"][0]["text"] == "done"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "line 1: it is not JSON"),
        ('{"custom_id": "a", "url": "/v1/completions"}', "line 1: it needs an object"),
        ('{"url": "/v1/completions", "body": {}}', "needs a custom_id"),
        ('{"custom_id": "a", "url": "/flush_cache", "body": {}}', "url must be one of"),
    ],
)
async def test_a_file_without_any_request_is_refused_before_anything_is_asked(
    serve: MakeClient, tmp_path: Path, text: str, reason: str
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(text + "\n")
    client = serve()
    with pytest.raises(InvalidRequest, match=reason):
        await run_batch(client.app, source, tmp_path / "out.jsonl", concurrency=1)  # type: ignore[attr-defined]
    assert not client.core.requests  # type: ignore[attr-defined]


async def test_a_line_that_is_no_request_gets_an_error_and_the_others_are_answered(
    serve: MakeClient, tmp_path: Path
) -> None:
    source = write(tmp_path / "in.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    first, second = source.read_bytes().splitlines(keepends=True)
    bad_url = b'{"custom_id": "u", "url": "/x", "body": {}}\n'
    source.write_bytes(first + b"{cut\n" + bad_url + b"\xff\n" + second + first)
    target = tmp_path / "out.jsonl"
    client = serve()
    counts = await run_batch(client.app, source, target, concurrency=2)  # type: ignore[attr-defined]
    assert (counts.total, counts.done, counts.failed, counts.invalid) == (6, 6, 4, 4)
    lines = [json.loads(line) for line in target.read_text().splitlines()]
    good = {line["custom_id"]: line["response"]["status_code"] for line in lines if line["error"] is None}
    assert good == {"r0": 200, "r1": 200}
    bad = {line["error"]["line"]: line for line in lines if line["error"] is not None}
    assert sorted(bad) == [2, 3, 4, 6]
    assert all(line["response"] is None for line in bad.values())
    assert [bad[n]["custom_id"] for n in (2, 3)] == [None, "u"]
    assert "not JSON" in bad[2]["error"]["message"]
    assert "used twice" in bad[6]["error"]["message"]
    again = await run_batch(client.app, source, target, concurrency=2)  # type: ignore[attr-defined]
    assert (again.done, again.before) == (0, 6)


def test_blank_lines_are_skipped(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [{"prompt": "a"}])
    source.write_text("\n" + source.read_text() + "\n\n")
    assert [line.number for line in read_lines(source)] == [2]
