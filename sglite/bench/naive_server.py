"""What people write first: FastAPI around transformers' `generate`. The other side of `sglite bench serve --compare`.

    lock     one request at a time, streamed
    static   what waits is padded to one batch (up to 16), which ends when its longest answer ends; not streamed

Both: float32, KV cache on, all threads, warmed. `python -m sglite.bench.naive_server --model M --mode lock --port 0`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import sys
import threading
from collections.abc import AsyncGenerator
from typing import Any

import torch
import transformers
import uvicorn
from fastapi import FastAPI, Request
from starlette.responses import StreamingResponse
from transformers.generation import BaseStreamer

from sglite.runtime.device.threads import usable_cpus
from sglite.runtime.models.sources import resolve_model

MAX_BATCH = 16


class Model:
    """transformers' model and tokenizer in float32, and how much of its KV was used."""

    def __init__(self, name: str) -> None:
        torch.set_num_threads(usable_cpus())
        folder = str(resolve_model(name).folder)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.lock = threading.Lock()
        self.kv_used = self.kv_taken = 0  # tokens, over all calls
        self.generate(["warm up"], 4)

    def generate(self, prompts: list[str], max_tokens: int, streamer: Any = None) -> list[tuple[str, int]]:
        """(text, output tokens) of each prompt."""
        inputs = self.tokenizer(prompts, return_tensors="pt", padding=True)
        with self.lock, torch.inference_mode():
            output = self.model.generate(
                **inputs,
                max_new_tokens=max_tokens,
                do_sample=False,
                streamer=streamer,
                pad_token_id=self.tokenizer.pad_token_id,
            )
        width = inputs["input_ids"].shape[1]
        answers = [row[row != self.tokenizer.pad_token_id] for row in output[:, width:]]
        self.kv_taken += output.numel()
        self.kv_used += int(inputs["attention_mask"].sum()) + sum(len(answer) for answer in answers)
        return [(self.tokenizer.decode(answer, skip_special_tokens=True), len(answer)) for answer in answers]


class Streamer(BaseStreamer):
    """Each token's id as it comes, for one coroutine; the first call brings the prompt."""

    def __init__(self) -> None:
        self.items: asyncio.Queue[int | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._prompt = True

    def put(self, value: torch.Tensor) -> None:
        if self._prompt:
            self._prompt = False
            return
        self._loop.call_soon_threadsafe(self.items.put_nowait, int(value.flatten()[0]))

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self.items.put_nowait, None)


def make_app(model: Model, mode: str) -> FastAPI:
    app = FastAPI()
    batches: asyncio.Queue[tuple[dict[str, Any], asyncio.Future[tuple[str, int]]]] = asyncio.Queue()
    tasks: list[asyncio.Task[None]] = []

    async def batcher() -> None:
        while True:
            jobs = [await batches.get()]
            await asyncio.sleep(0.05)
            while len(jobs) < MAX_BATCH and not batches.empty():
                jobs.append(batches.get_nowait())
            longest = max(body["max_tokens"] for body, _ in jobs)
            answers = await asyncio.to_thread(model.generate, [body["prompt"] for body, _ in jobs], longest)
            for (_, future), answer in zip(jobs, answers, strict=True):
                future.set_result(answer)

    @app.post("/v1/completions")
    async def completions(request: Request) -> StreamingResponse:
        body = await request.json()
        events = _streamed(model, body) if mode == "lock" else _batched(body)
        return StreamingResponse(events, media_type="text/event-stream")

    async def _batched(body: dict[str, Any]) -> AsyncGenerator[bytes, None]:
        if not tasks:
            tasks.append(asyncio.ensure_future(batcher()))
        future: asyncio.Future[tuple[str, int]] = asyncio.get_running_loop().create_future()
        batches.put_nowait((body, future))
        text, tokens = await future
        yield _event(text)
        yield _usage(tokens)

    @app.get("/kv_use")
    async def kv_use() -> dict[str, float]:
        return {"kv_use": model.kv_used / max(1, model.kv_taken)}

    return app


async def _streamed(model: Model, body: dict[str, Any]) -> AsyncGenerator[bytes, None]:
    streamer = Streamer()
    threading.Thread(target=model.generate, args=([body["prompt"]], body["max_tokens"], streamer), daemon=True).start()
    tokens = 0
    while (token := await streamer.items.get()) is not None:
        tokens += 1
        yield _event(model.tokenizer.decode([token]))
    yield _usage(tokens)


def _event(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "text": text}]}).encode() + b"\n\n"


def _usage(tokens: int) -> bytes:
    return b"data: " + json.dumps({"choices": [], "usage": {"completion_tokens": tokens}}).encode() + b"\n\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--mode", choices=("lock", "static"), default="lock")
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    app = make_app(Model(options.model), options.mode)
    listener = socket.socket()
    listener.bind(("127.0.0.1", options.port))
    print(f"serving on http://127.0.0.1:{listener.getsockname()[1]}", file=sys.stderr, flush=True)
    uvicorn.Server(uvicorn.Config(app, log_config=None)).run(sockets=[listener])


if __name__ == "__main__":
    main()
