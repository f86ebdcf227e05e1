"""Many clients at once against one server with a tiny model: nothing lost, doubled or crossed, all memory comes back.

SGLITE_LOAD_SECONDS sets how long (60 s is the full test; the default is short).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import psutil
import pytest

from sglite.runtime.async_engine import Engine
from sglite.runtime.server.config import ServerConfig
from tests.runtime.server.conftest import Live

pytestmark = pytest.mark.model  # for the tokenizer

SECONDS = float(os.environ.get("SGLITE_LOAD_SECONDS", "6"))
CLIENTS = 64
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
        "n": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["name", "tags", "n"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "act", "parameters": SCHEMA}}
BAD: list[dict[str, Any]] = [
    {"regex": "[a"},
    {"n": 10**6},
    {"temperature": -3},
    {"logit_bias": {"99999999": 1}},
    {"response_format": {"type": "json_schema", "json_schema": {"strict": True, "schema": {"type": "nothing"}}}},
    {"unknown": 1},
]


def tiny_config(folder: Path) -> Path:
    """Two layers of a Llama, with the small model's vocabulary."""
    folder.mkdir(exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 49152,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "eos_token_id": 2,
        "bos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Live]:
    engine = Engine(
        str(tiny_config(tmp_path / "model")),
        tokenizer="smollm2",
        load_format="dummy",
        max_rows=48,
        num_pages=6000,
        check_invariants=True,
    )
    live = Live(engine, ServerConfig(max_running=64, max_waiting=256, log_requests=False))
    yield live
    live.stop()
    engine.close()


def requests() -> list[dict[str, Any]]:
    """Distinct requests with one right (greedy) answer each."""
    made: list[dict[str, Any]] = []
    for i in range(8):
        base = {"messages": [{"role": "user", "content": f"Say something about the number {i}."}], "temperature": 0}
        made.append({**base, "max_tokens": 24 + i})
        form = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
        made.append({**base, "max_tokens": 120, "response_format": form})
        made.append(
            {**base, "max_tokens": 160, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
        )
        made.append({**base, "max_tokens": 20, "n": 2, "logprobs": True})
    return made


async def events(client: httpx.AsyncClient, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    async with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                yield json.loads(line[6:])


async def answer(client: httpx.AsyncClient, body: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(content, tool arguments, finish reason) of each completion, joined from the stream."""
    content, arguments, finish = Counter[int](), {}, {}
    texts: dict[int, str] = {}
    async for event in events(client, body):
        assert "error" not in event, event
        for choice in event["choices"]:
            index, delta = choice["index"], choice["delta"]
            texts[index] = texts.get(index, "") + (delta.get("content") or "")
            for call in delta.get("tool_calls") or ():
                arguments[index] = arguments.get(index, "") + call["function"]["arguments"]
            if choice["finish_reason"]:
                content[index] += 1
                finish[index] = choice["finish_reason"]
    assert all(count == 1 for count in content.values()), "a completion ended twice"
    return [(texts[i], arguments.get(i, ""), finish[i]) for i in sorted(texts)]


@pytest.mark.timeout(300)
async def test_64_clients_get_their_own_answers(server: Live) -> None:
    limits = httpx.Limits(max_connections=CLIENTS, max_keepalive_connections=CLIENTS)
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
        bodies = requests()
        right = [await answer(client, body) for body in bodies]
        for body, found in zip(bodies, right, strict=True):
            _check_schema(body, found)
        kinds = Counter[str]()
        resident: list[int] = []
        end = time.monotonic() + SECONDS

        async def user(number: int) -> None:
            dice = random.Random(number)
            while time.monotonic() < end:
                which = dice.randrange(len(bodies))
                kind = dice.choices(["whole", "abort", "bad"], [8, 2, 1])[0]
                if kind == "whole":
                    assert await answer(client, bodies[which]) == right[which], f"request {which} got another answer"
                elif kind == "abort":
                    await _leave(client, {**bodies[which], "max_tokens": 200}, after=dice.randrange(6))
                else:
                    response = await client.post("/v1/chat/completions", json={**bodies[which], **dice.choice(BAD)})
                    assert response.status_code == 400
                kinds[kind] += 1

        async def watch() -> None:
            while time.monotonic() < end:
                resident.append(psutil.Process().memory_info().rss)
                await asyncio.sleep(0.5)

        await asyncio.gather(watch(), *(user(number) for number in range(CLIENTS)))
    assert kinds["whole"] > CLIENTS / 2
    await _all_memory_is_back(server)
    half = len(resident) // 2
    growth = max(resident[half:]) - max(resident[: half + 1])
    assert growth < 64 << 20, f"memory grew by {growth >> 20} MiB"


async def _leave(client: httpx.AsyncClient, body: dict[str, Any], *, after: int) -> None:
    """Close the connection after some events."""
    stream = events(client, body)
    async for _ in stream:
        after -= 1
        if after < 0:
            break
    await stream.aclose()  # type: ignore[attr-defined]


async def _all_memory_is_back(server: Live) -> None:
    end = time.monotonic() + 10
    while True:
        stats = await asyncio.to_thread(server.engine.stats)
        busy = stats["running"] + stats["waiting"] + stats["pages_owned"] + stats["pages_protected"]
        if not busy:
            break
        assert time.monotonic() < end, stats
        await asyncio.sleep(0.05)
    assert stats["pages_free"] + stats["pages_cached"] == stats["pages_total"]
    assert stats["accounting_problems"] == 0
    assert stats["failed_steps"] == 0
    admission = server.app.state.service.admission
    assert (admission.running, admission.waiting) == (0, 0)


def _check_schema(body: dict[str, Any], found: list[tuple[str, str, str]]) -> None:
    for content, arguments, finish in found:
        if "response_format" in body and finish != "length":
            jsonschema.validate(json.loads(content), SCHEMA)
        if "tools" in body and finish != "length":
            jsonschema.validate(json.loads(arguments), SCHEMA)
