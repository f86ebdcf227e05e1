"""Programs on remote backends: what goes over the wire, and that nothing asked for is lost on it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

import sglite as sgl
from sglite.errors import BackendError, InvalidRequest, Overloaded, ProgramError, UnsupportedSchema
from sglite.protocol import GenerateRequest
from sglite.runtime.server.app import create_app
from sglite.runtime.server.config import ServerConfig
from tests.fakes.core import echo, scripted_engine
from tests.fakes.tokenizer import ByteTokenizer

Serve = Callable[[Any], str]


class Person(BaseModel):
    name: str
    age: int


class FakeOpenAI:
    """Answers chat and text completions with `answer`, and keeps the bodies it got."""

    def __init__(self, answer: str | Response) -> None:
        self.answer = answer
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self.app = Starlette(
            routes=[
                Route("/v1/chat/completions", self.complete, methods=["POST"]),
                Route("/v1/completions", self.complete, methods=["POST"]),
            ]
        )

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(request.headers)
        if isinstance(self.answer, Response):
            return self.answer
        chat = request.url.path.endswith("chat/completions")
        if body.get("stream"):
            return StreamingResponse(self.events(chat), media_type="text/event-stream")
        choices = [
            {"index": i, "finish_reason": "stop", **self.part(chat, "message", self.answer)}
            for i in range(body.get("n", 1))
        ]
        return JSONResponse({"choices": choices, "usage": {"prompt_tokens": 5, "completion_tokens": 3}})

    async def events(self, chat: bool) -> Any:
        assert isinstance(self.answer, str)
        for char in self.answer:
            yield self.event({"choices": [{"index": 0, **self.part(chat, "delta", char)}]})
        yield self.event({"choices": [{"index": 0, "finish_reason": "stop", **self.part(chat, "delta", "")}]})
        yield self.event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}})
        yield "data: [DONE]\n\n"

    @staticmethod
    def part(chat: bool, key: str, text: str) -> dict[str, Any]:
        return {key: {"content": text}} if chat else {"text": text}

    @staticmethod
    def event(data: Any) -> str:
        return f"data: {json.dumps(data)}\n\n"


@sgl.function
def chat(s: Any, **options: Any) -> None:
    s += sgl.system("S")
    s += sgl.user("U")
    s += sgl.assistant(sgl.gen("a", **options))


class TestOpenAI:
    def backend(self, serve: Serve, answer: str | Response, **options: Any) -> tuple[FakeOpenAI, Any]:
        fake = FakeOpenAI(answer)
        return fake, sgl.OpenAI("some-model", base_url=serve(fake.app) + "/v1", api_key="key", **options)

    def test_a_chat_is_sent_as_messages(self, serve: Serve) -> None:
        fake, backend = self.backend(serve, "hello")
        state = chat.run(backend=backend, max_tokens=9, temperature=0.5, stop="zz")
        assert state["a"] == "hello"
        assert state.usage.prompt_tokens == 5
        assert state.messages()[-1] == {"role": "assistant", "content": "hello"}
        assert fake.bodies == [
            {
                "model": "some-model",
                "messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}],
                "max_tokens": 9,
                "temperature": 0.5,
                "stop": ["zz"],
            }
        ]
        assert fake.headers[0]["authorization"] == "Bearer key"

    def test_it_streams(self, serve: Serve) -> None:
        _, backend = self.backend(serve, "hello 日本")
        state = chat.run(backend=backend, stream=True)
        assert "".join(state.text_iter("a")) == "hello 日本"
        assert state.usage.completion_tokens == 3

    def test_a_schema_goes_as_response_format(self, serve: Serve) -> None:
        fake, backend = self.backend(serve, '{"name":"Ann","age":3}')
        assert chat.run(backend=backend, schema=Person)["a"] == Person(name="Ann", age=3)
        sent = fake.bodies[0]["response_format"]["json_schema"]
        assert sent["strict"] is True
        assert list(sent["schema"]["properties"]) == ["name", "age"]

    @pytest.mark.parametrize("extra", [{"regex": "a"}, {"dtype": int}, {"top_k": 3}, {"ignore_eos": True}])
    def test_what_the_api_cannot_do_is_refused(self, serve: Serve, extra: dict[str, Any]) -> None:
        fake, backend = self.backend(serve, "x")
        with pytest.raises(ProgramError, match="OpenAI's API") as caught:
            chat.run(backend=backend, **extra)
        assert isinstance(caught.value.__cause__, InvalidRequest)
        assert fake.bodies == []

    def test_values_that_ask_for_nothing_are_let_through(self, serve: Serve) -> None:
        _, backend = self.backend(serve, "x")
        assert chat.run(backend=backend, top_k=-1)["a"] == "x"

    def test_select_asks_for_one_of_its_options(self, serve: Serve) -> None:
        fake, backend = self.backend(serve, '{"choice":"no"}')

        @sgl.function
        def program(s: Any) -> None:
            s += sgl.user("U")
            s += sgl.assistant(sgl.select("a", ["yes", "no"]))

        assert program.run(backend=backend)["a"] == "no"
        schema = fake.bodies[0]["response_format"]["json_schema"]["schema"]
        assert schema["properties"]["choice"]["enum"] == ["yes", "no"]

    def test_a_message_that_has_begun_cannot_be_continued(self, serve: Serve) -> None:
        _, backend = self.backend(serve, "x")

        @sgl.function
        def program(s: Any) -> None:
            s += sgl.user("U")
            s += sgl.assistant("Well, " + sgl.gen("a"))

        @sgl.function
        def outside(s: Any) -> None:
            s += "text" + sgl.gen("a")

        with pytest.raises(ProgramError, match="cannot continue a message"):
            program.run(backend=backend)
        with pytest.raises(ProgramError, match="chats only"):
            outside.run(backend=backend)

    def test_n_and_the_completions_api(self, serve: Serve) -> None:
        fake, backend = self.backend(serve, "x", is_chat_model=False)

        @sgl.function
        def program(s: Any) -> None:
            s += "text" + sgl.gen("a", n=2)

        assert program.run(backend=backend)["a"] == ["x", "x"]
        assert fake.bodies[0]["prompt"] == "text"
        with pytest.raises(ProgramError, match="completions API cannot enforce"):
            chat.run(backend=backend, schema=Person)

    def test_errors_of_the_api_are_typed(self, serve: Serve) -> None:
        busy = JSONResponse({"error": {"message": "slow down"}}, status_code=429, headers={"retry-after": "7"})
        with pytest.raises(ProgramError, match="slow down") as caught:
            chat.run(backend=self.backend(serve, busy)[1])
        assert isinstance(caught.value.__cause__, Overloaded)
        assert caught.value.__cause__.retry_after == 7
        broken = JSONResponse({"error": {"message": "no such model"}}, status_code=404)
        with pytest.raises(ProgramError, match="no such model") as caught:
            chat.run(backend=self.backend(serve, broken)[1], stream=False)
        assert isinstance(caught.value.__cause__, BackendError)

    def test_a_server_that_is_not_there(self) -> None:
        backend = sgl.OpenAI("m", base_url="http://127.0.0.1:9/v1", api_key="k")
        with pytest.raises(ProgramError, match="does not answer"):
            chat.run(backend=backend)


class FakeGenerate:
    """SGLang's /generate over the byte tokenizer: answers with `answer`, scores an option by its length."""

    def __init__(self, answer: str, *, ids: bool = True) -> None:
        self.answer = answer
        self.ids = ids
        self.bodies: list[dict[str, Any]] = []
        self.app = Starlette(
            routes=[
                Route("/get_model_info", self.info),
                Route("/generate", self.generate, methods=["POST"]),
                Route("/flush_cache", self.flush, methods=["POST"]),
            ]
        )

    async def info(self, request: Request) -> Response:
        return JSONResponse({"model_path": "m", "tokenizer_path": "m", "vocab_size": 259})

    async def flush(self, request: Request) -> Response:
        return JSONResponse({})

    async def generate(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        if "nonsense" in str(body["sampling_params"].get("json_schema")):
            error = {"message": "no", "code": "unsupported_schema", "pointer": "/x", "keyword": "nonsense"}
            return JSONResponse({"error": error}, status_code=400)
        if body.get("input_ids") and isinstance(body["input_ids"][0], list):
            return JSONResponse([self.scored(ids, body["logprob_start_len"]) for ids in body["input_ids"]])
        answer = self.answer if body["sampling_params"].get("max_new_tokens") != 0 else ""
        if body.get("stream"):
            return StreamingResponse(self.events(answer), media_type="text/event-stream")
        return JSONResponse(self.whole(body, answer))

    async def events(self, answer: str) -> Any:
        for end in range(1, len(answer) + 1):
            data = self.whole({}, answer[:end])
            if end < len(answer):
                data["meta_info"]["finish_reason"] = None
            yield f"data: {json.dumps(data)}\n\n"
        yield "data: [DONE]\n\n"

    def whole(self, body: dict[str, Any], text: str) -> dict[str, Any]:
        ids = list(text.encode())
        meta: dict[str, Any] = {
            "prompt_tokens": len(body.get("input_ids") or body.get("text") or ""),
            "completion_tokens": len(ids),
            "finish_reason": {"type": "stop", "matched": 257},
        }
        if body.get("return_logprob"):
            meta["output_token_logprobs"] = [[-0.5, t, None] for t in ids]
        answer: dict[str, Any] = {"text": text, "meta_info": meta}
        if self.ids:
            answer["output_ids"] = ids
        return answer

    def scored(self, ids: list[int], start: int) -> dict[str, Any]:
        entries = [[None if i == 0 else -1.0, t, None] for i, t in enumerate(ids[start:])]
        return {"text": "", "meta_info": {"input_token_logprobs": entries, "finish_reason": None}}


class TestRuntimeEndpoint:
    def backend(
        self, serve: Serve, answer: str, *, tokenizer: bool = True, ids: bool = True
    ) -> tuple[FakeGenerate, Any]:
        fake = FakeGenerate(answer, ids=ids)
        return fake, sgl.RuntimeEndpoint(serve(fake.app), tokenizer=ByteTokenizer() if tokenizer else None)

    @pytest.mark.parametrize("ids", [True, False])
    @pytest.mark.parametrize("stream", [True, False])
    def test_token_ids_go_and_come(self, serve: Serve, stream: bool, ids: bool) -> None:
        fake, backend = self.backend(serve, "hello", ids=ids)

        @sgl.function
        def program(s: Any) -> None:
            s += "a:" + sgl.gen("x", max_tokens=9, regex="[a-z]+", seed=3) + "b:" + sgl.gen("y")

        state = program.run(backend=backend, stream=stream)
        assert state.text() == "a:hellob:hello"
        first, second = fake.bodies
        assert bytes(first["input_ids"]) == b"a:"
        assert bytes(second["input_ids"]) == b"a:hellob:"
        assert first["sampling_params"] == {"max_new_tokens": 9, "sampling_seed": 3, "regex": "[a-z]+"}
        assert first["stream"] is stream

    def test_without_a_tokenizer_the_state_is_text(self, serve: Serve) -> None:
        fake, backend = self.backend(serve, "hello", tokenizer=False)

        @sgl.function
        def program(s: Any) -> None:
            s += "a:" + sgl.gen("x")

        assert program.run(backend=backend).text() == "a:hello"
        assert fake.bodies[0]["text"] == "a:"
        with pytest.raises(ProgramError, match="tokenizer=FOLDER"):
            chat.run(backend=backend)

    def test_select_scores_all_options_in_one_request(self, serve: Serve) -> None:
        fake, backend = self.backend(serve, "")

        @sgl.function
        def program(s: Any) -> None:
            s += "a:" + sgl.select("x", ["long one", "b"], choices_method=sgl.total_probability)

        assert program.run(backend=backend)["x"] == "b"
        assert len(fake.bodies) == 1

    def test_what_the_server_refuses_is_the_error_it_said(self, serve: Serve) -> None:
        _, backend = self.backend(serve, "")
        with pytest.raises(UnsupportedSchema, match="/x"):

            @sgl.function
            def program(s: Any) -> None:
                s += "a" + sgl.gen("x", schema={"nonsense": 1})

            program.compile(backend=backend)
        with pytest.raises(ProgramError, match="takes no lark"):
            chat.run(backend=backend, lark='start: "a"')
        assert sgl.flush_cache(backend) is True

    def test_a_server_that_is_not_there(self) -> None:
        with pytest.raises(BackendError, match="does not answer"):
            sgl.RuntimeEndpoint("http://127.0.0.1:9")


def test_runtime_is_an_engine_with_sglangs_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.fakes.client import ScriptedClient

    class FakeEngine(ScriptedClient):
        def __init__(self, **options: Any) -> None:
            super().__init__()
            self.options = options
            self.closed = False

        def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
            return list(text.encode())

        def close(self) -> None:
            self.closed = True

    monkeypatch.setattr(sgl, "Engine", FakeEngine, raising=False)
    with sgl.Runtime(model_path="m", log_level="error", port=30000) as runtime:
        assert runtime.endpoint.options == {"model_path": "m"}
        assert runtime.cache_prefix("abc") == 3
        assert chat.run(backend=runtime)["a"] == "answer 1"
        assert runtime.flush_cache()
    assert runtime.endpoint.closed


class TestSgliteServer:
    """RuntimeEndpoint against the real server, over a scripted engine."""

    def backend(self, serve: Serve) -> Any:
        engine = scripted_engine(echo)
        return engine, sgl.RuntimeEndpoint(serve(create_app(engine, ServerConfig())), tokenizer=ByteTokenizer())

    @pytest.mark.parametrize("stream", [True, False])
    def test_a_program_runs_the_same_there_and_here(self, serve: Serve, stream: bool) -> None:
        @sgl.function
        def program(s: Any) -> None:
            s += "ab" + sgl.gen("x", max_tokens=5, temperature=0, seed=1) + "cd" + sgl.gen("y", max_tokens=4, stop="zz")
            s += sgl.user("hello")
            s += sgl.assistant(sgl.gen("z", max_tokens=6))

        engine, backend = self.backend(serve)
        with engine:
            remote = program.run(backend=backend, stream=stream)
            remote.sync()  # a stream would run on beside the local run, and the requests are told apart by their order
            local = program.run(backend=engine)
            assert remote.text() == local.text()
            assert remote["y"] == local["y"] != ""
            assert remote.messages() == local.messages()
            asked = [r for r in engine.core.requests if isinstance(r, GenerateRequest)]
            assert [r.heal for r in asked[:3]] == [r.heal for r in asked[3:]] == [True, True, False]
            assert all(r.program is not None and r.program.program_id for r in asked)

    def test_its_refusals_are_the_same_errors(self, serve: Serve) -> None:
        @sgl.function
        def program(s: Any) -> None:
            s += "ab" + sgl.gen("x", stop_token_ids=[10**6])

        engine, backend = self.backend(serve)
        with engine, pytest.raises(ProgramError) as caught:
            program.run(backend=backend)
        assert isinstance(caught.value.__cause__, InvalidRequest)


def test_an_address_without_its_scheme_is_refused_in_words() -> None:
    with pytest.raises(InvalidRequest, match="write http://localhost:30000"):
        sgl.RuntimeEndpoint("localhost:30000")
