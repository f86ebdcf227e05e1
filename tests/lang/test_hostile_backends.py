"""Remote servers that break off, take back or garble their answers: always a BackendError, never a wrong value."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import sglite as sgl
from sglite.errors import BackendError, ProgramError

Serve = Callable[[Any], str]
STOP = {"type": "stop"}


@sgl.function
def program(s: Any, **options: Any) -> None:
    s += "x" + sgl.gen("a", **options)


def piece(text: Any, finish: Any = None, **fields: Any) -> dict[str, Any]:
    return {"text": text, "meta_info": {"finish_reason": finish}, **fields}


def choice(text: Any, finish: Any = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish, **fields}]}


def stream_of(*events: Any, done: bool = True) -> Response:
    lines = [f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n" for event in events]
    return Response("".join(lines) + ("data: [DONE]\n\n" if done else ""), media_type="text/event-stream")


def served(serve: Serve, answer: Response, info: Any = None) -> str:
    async def tell(request: Request) -> Response:
        return answer

    async def model(request: Request) -> Response:
        return JSONResponse({"model_path": "m"} if info is None else info)

    routes = [Route("/get_model_info", model), Route("/{path:path}", tell, methods=["POST"])]
    return serve(Starlette(routes=routes))


def endpoint(serve: Serve, answer: Response) -> Any:
    return sgl.RuntimeEndpoint(served(serve, answer))


def openai(serve: Serve, answer: Response) -> Any:
    return sgl.OpenAI("m", base_url=served(serve, answer), api_key="k", is_chat_model=False)


def refused(backend: Any, *, stream: bool, match: str = "", **options: Any) -> None:
    with pytest.raises(ProgramError, match=match) as caught:
        program.run(backend=backend, stream=stream, **options)["a"]
    assert isinstance(caught.value.__cause__, BackendError)


@pytest.mark.parametrize("done", [True, False])
def test_a_stream_that_breaks_off_is_no_answer(serve: Serve, done: bool) -> None:
    refused(endpoint(serve, stream_of(piece("a"), done=done)), stream=True, match="ended before")
    refused(openai(serve, stream_of(choice("a"), done=done)), stream=True, match="ended before")


def test_an_answer_without_an_end_is_none(serve: Serve) -> None:
    refused(endpoint(serve, JSONResponse(piece("a"))), stream=False, match="ended before")
    refused(openai(serve, JSONResponse(choice("a"))), stream=False, match="ended before")


def test_a_filtered_answer_is_none(serve: Serve) -> None:
    refused(openai(serve, JSONResponse(choice("a", "content_filter"))), stream=False, match="gave the answer up")


@pytest.mark.parametrize(
    ("events", "match"),
    [
        ([piece("ab"), piece("b", STOP)], "took back"),
        ([piece("ab"), piece("xbc", STOP)], "took back"),
        ([piece("ab", STOP, index=-1)], "completion -1"),
        ([piece("ab", STOP, index=3)], "completion 3"),
    ],
)
def test_a_stream_that_contradicts_itself_is_refused(serve: Serve, events: list[Any], match: str) -> None:
    refused(endpoint(serve, stream_of(*events)), stream=True, match=match)


def test_the_beginning_of_a_stop_text_is_held_back_until_it_is_known(serve: Serve) -> None:
    cut = stream_of(piece("a"), piece("a\n"), piece("a\nQ"), piece("a", {"type": "stop", "matched": "\nQ:"}))
    assert program.run(backend=endpoint(serve, cut), stream=True, stop="\nQ:").text() == "xa"
    kept = stream_of(piece("a\n"), piece("a\nb"), piece("a\nbc", STOP))
    assert program.run(backend=endpoint(serve, kept), stream=True, stop="\nQ:").text() == "xa\nbc"
