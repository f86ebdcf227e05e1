"""The other way: calls that know nothing of each other. Siblings are sent at once, `select` is one request an option.

EngineCalls   to an Engine in this process, as well as a client can make them: no HTTP, whole histories as token ids,
              so what was generated is found in the prefix cache again
TextCalls     over HTTP as an OpenAI client makes them: /v1/completions with whole histories as text. What OpenAI's
              API scores options with (echo and logprobs of the whole prompt) has the server compute the whole prompt
              each time; SGLang's /generate asks for the options' probabilities alone, and is taken in its place
IdCalls       over HTTP with token ids, in and out, on SGLang's /generate: nothing is tokenised anew
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from typing import Any, Protocol, Self

import httpx

from sglite.bench.programs.record import Recorder
from sglite.errors import BackendError
from sglite.protocol import GenerateRequest, GrammarSpec, RequestOutput, SamplingParams, ScoreRequest
from sglite.text.types import TextTokenizer

_MERGED = 2  # tokens at a text's end that may be others when something follows it


class Loose(Protocol):
    """A text that grows by calls."""

    def add(self, text: str) -> None: ...

    def fork(self, size: int) -> Sequence[Self]: ...

    async def gen(self, sampling: SamplingParams, grammar: GrammarSpec | None = None) -> str:
        """The answer, which the text goes on with."""
        ...

    async def select(self, options: Sequence[str]) -> str:
        """The option with the best mean log-probability of its tokens, which the text goes on with."""
        ...


class EngineCalls:
    """Satisfies `Loose`."""

    def __init__(self, recorder: Recorder, program: str, ids: Sequence[int] = ()) -> None:
        self._recorder = recorder
        self._program = program
        self._ids = list(ids)

    def add(self, text: str) -> None:
        self._ids += self._recorder.tokenizer.encode(text)

    def fork(self, size: int) -> list[EngineCalls]:
        return [EngineCalls(self._recorder, self._program, self._ids) for _ in range(size)]

    async def gen(self, sampling: SamplingParams, grammar: GrammarSpec | None = None) -> str:
        request = GenerateRequest(
            request_id=self._recorder.engine.new_request_id(),
            prompt=tuple(self._ids),
            sampling_params=sampling,
            grammar=grammar,
            stream=False,
        )
        outputs: list[RequestOutput] = []
        async for output in self._recorder.stream_request(request, program=self._program):
            outputs.append(output)
        self._ids += outputs[-1].token_ids
        return outputs[-1].text

    async def select(self, options: Sequence[str]) -> str:
        ids = [tuple(self._recorder.tokenizer.encode(option)) for option in options]
        found = await asyncio.gather(*(self._score(one) for one in ids))
        best = max(range(len(options)), key=lambda i: found[i])
        self._ids += ids[best]
        return options[best]

    async def _score(self, option: tuple[int, ...]) -> float:
        request: Any = ScoreRequest(
            request_id=self._recorder.engine.new_request_id(), prompt=tuple(self._ids), continuations=(option,)
        )
        output = await self._recorder.score_request(request, program=self._program)
        return sum(output.logprobs[0]) / len(option)


class Wire:
    """What the calls over HTTP share: one client, whose connections are kept alive."""

    def __init__(self, http: httpx.AsyncClient, tokenizer: TextTokenizer) -> None:
        self.tokenizer = tokenizer
        self._http = http
        self._numbers = itertools.count()

    async def post(self, path: str, body: dict[str, Any], *, program: str) -> Any:
        """Raises BackendError. The program's name goes with the request's id: who looks at the server's record wants to
        know."""
        marks = {"x-request-id": f"{program}.{next(self._numbers)}"}
        try:
            answer = await self._http.post(path, json=body, headers=marks)
        except httpx.HTTPError as error:
            raise BackendError(f"the server of the bench does not answer: {error or type(error).__name__}") from error
        if answer.status_code != 200:
            raise BackendError(f"the server of the bench answered {answer.status_code}: {answer.text[:500]}")
        return answer.json()

    async def scores(self, given: dict[str, Any], last: int, *, start: int, program: str) -> float:
        """Mean log-probability of the last tokens of a prompt; the server looks at those from `start` on."""
        body = {
            **given,
            "sampling_params": {"max_new_tokens": 0, "temperature": 0},
            "return_logprob": True,
            "logprob_start_len": start,
        }
        answer = await self.post("/generate", body, program=program)
        entries = answer["meta_info"]["input_token_logprobs"][-last:]
        return sum(entry[0] for entry in entries if entry[0] is not None) / len(entries)


class TextCalls:
    """Satisfies `Loose`."""

    def __init__(self, wire: Wire, program: str, text: str = "", known: tuple[int, int] = (0, 0)) -> None:
        """`known`: a beginning of the text, in characters, and how many tokens the server has found in it."""
        self._wire = wire
        self._program = program
        self._text = text
        self._known = known

    def add(self, text: str) -> None:
        self._text += text

    def fork(self, size: int) -> list[TextCalls]:
        return [TextCalls(self._wire, self._program, self._text, self._known) for _ in range(size)]

    async def gen(self, sampling: SamplingParams, grammar: GrammarSpec | None = None) -> str:
        body: dict[str, Any] = {
            "model": "default",
            "prompt": self._text,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "ignore_eos": sampling.ignore_eos,
        }
        if grammar is not None:
            schema = {"name": "answer", "schema": json.loads(grammar.source), "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        answer = await self._wire.post("/v1/completions", body, program=self._program)
        text = answer["choices"][0]["text"]
        self._known = len(self._text), answer["usage"]["prompt_tokens"]
        self._text += text
        return text

    async def select(self, options: Sequence[str]) -> str:
        length, tokens = self._known
        tokens += len(self._wire.tokenizer.encode(self._text[length:]))
        start = max(1, tokens - _MERGED)
        found = await asyncio.gather(*(self._score(option, start) for option in options))
        best = options[max(range(len(options)), key=lambda i: found[i])]
        self._text += best
        return best

    async def _score(self, option: str, start: int) -> float:
        size = len(self._wire.tokenizer.encode(option))
        return await self._wire.scores({"text": self._text + option}, size, start=start, program=self._program)


class IdCalls:
    """Satisfies `Loose`."""

    def __init__(self, wire: Wire, program: str, ids: Sequence[int] = ()) -> None:
        self._wire = wire
        self._program = program
        self._ids = list(ids)

    def add(self, text: str) -> None:
        self._ids += self._wire.tokenizer.encode(text)

    def fork(self, size: int) -> list[IdCalls]:
        return [IdCalls(self._wire, self._program, self._ids) for _ in range(size)]

    async def gen(self, sampling: SamplingParams, grammar: GrammarSpec | None = None) -> str:
        params: dict[str, Any] = {
            "max_new_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "ignore_eos": sampling.ignore_eos,
        }
        if grammar is not None:
            params["json_schema"] = grammar.source
        body = {"input_ids": self._ids, "sampling_params": params}
        answer = await self._wire.post("/generate", body, program=self._program)
        self._ids += answer["output_ids"]
        return answer["text"]

    async def select(self, options: Sequence[str]) -> str:
        ids = [self._wire.tokenizer.encode(option) for option in options]
        found = await asyncio.gather(*map(self._score, ids))
        best = max(range(len(options)), key=lambda i: found[i])
        self._ids += ids[best]
        return options[best]

    async def _score(self, option: list[int]) -> float:
        start = len(self._ids)
        given = {"input_ids": [*self._ids, *option]}
        return await self._wire.scores(given, len(option), start=start, program=self._program)
