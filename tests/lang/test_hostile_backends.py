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


def refused(backend: Any, *, stream: bool, match: str = ".", **options: Any) -> None:
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


DEEP = "[" * 100_000
GARBLED: list[Any] = [
    "garbage",
    None,
    5,
    [None],
    {},
    {"text": "a"},
    piece(None, STOP),
    piece("a", STOP, output_ids=5),
    {"text": "a", "meta_info": None},
    {"text": "a", "meta_info": {"finish_reason": STOP, "prompt_tokens": "many"}},
    {"text": "a", "meta_info": {"finish_reason": STOP, "output_token_logprobs": [5]}},
    {"text": "a", "meta_info": {"finish_reason": "abort"}},
    {"choices": None},
    {"choices": [None]},
    choice({"a": 1}, "stop"),
    choice("a", "stop", index="q"),
]


def test_an_answer_in_an_unknown_shape_is_refused(serve: Serve) -> None:
    now: list[Response] = []

    async def tell(request: Request) -> Response:
        return now[-1]

    async def model(request: Request) -> Response:
        return JSONResponse({"model_path": "m"})

    routes = [Route("/get_model_info", model), Route("/{path:path}", tell, methods=["POST"])]
    url = serve(Starlette(routes=routes))
    own, other = sgl.RuntimeEndpoint(url), sgl.OpenAI("m", base_url=url, api_key="k", is_chat_model=False)
    for answer in GARBLED:
        for backend in (own, other):
            now.append(JSONResponse(answer))
            refused(backend, stream=False)
            now.append(stream_of(answer if not isinstance(answer, str) else json.dumps(answer)))
            refused(backend, stream=True)


@pytest.mark.parametrize("text", ["<html>", "", DEEP, "{'a': 1}"])
def test_an_answer_that_is_not_json_is_refused(serve: Serve, text: str) -> None:
    refused(endpoint(serve, Response(text)), stream=False, match="not JSON")
    refused(openai(serve, Response(text)), stream=False, match="not JSON")
    if text:
        refused(endpoint(serve, stream_of(text)), stream=True, match="not JSON")


@pytest.mark.parametrize("error", ["no luck", {"message": "no luck"}, {"message": "no luck", "status": "abc"}])
def test_an_error_with_status_200_keeps_its_message(serve: Serve, error: Any) -> None:
    for make in (endpoint, openai):
        refused(make(serve, JSONResponse({"error": error})), stream=False, match="no luck")
        refused(make(serve, JSONResponse({"error": error})), stream=True, match="no luck")
        refused(make(serve, stream_of({"error": error})), stream=True, match="no luck")


@pytest.mark.parametrize("info", ["garbage", ["a"], 5, {"vocab_size": "x"}, {"tokenizer_path": "a" * 5000}])
def test_a_server_that_says_nonsense_of_its_model_is_refused(serve: Serve, info: Any) -> None:
    url = served(serve, JSONResponse({}), info)
    with pytest.raises(BackendError, match="unknown shape"):
        sgl.RuntimeEndpoint(url)


PAGE = "<!DOCTYPE HTML>\n<html><head><title>Error\n response</title></head><body><p>File not found.</p></body></html>"


@pytest.mark.parametrize(
    "answer",
    [Response(PAGE, 404), Response(PAGE, 200), JSONResponse({"detail": "Not Found"}, 404), Response("", 302)],
    ids=["page", "200", "json", "elsewhere"],
)
def test_another_kind_of_server_is_told_with_what_to_do(serve: Serve, answer: Response) -> None:
    async def tell(request: Request) -> Response:
        return answer

    url = serve(Starlette(routes=[Route("/{path:path}", tell)]))
    with pytest.raises(BackendError, match="is neither an sglite nor an SGLang server") as caught:
        sgl.RuntimeEndpoint(url + "/v1/")
    message = str(caught.value)
    assert message.startswith(url + "/v1 is")
    assert "sglite.OpenAI(" in message
    assert "<" not in message


def test_a_page_instead_of_an_answer_is_shown_by_its_title(serve: Serve) -> None:
    for status, match in ((200, "not JSON: an HTML page, 'Error response'"), (502, "502: an HTML page, 'Error resp")):
        refused(endpoint(serve, Response(PAGE, status)), stream=False, match=match)
        refused(openai(serve, Response(PAGE, status)), stream=False, match=match)


def test_a_closed_backend_says_so(serve: Serve) -> None:
    backend = endpoint(serve, JSONResponse(piece("a", STOP)))
    assert program.run(backend=backend)["a"] == "a"
    backend.close()
    refused(backend, stream=False, match="has been closed")
