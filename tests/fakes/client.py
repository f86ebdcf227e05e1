"""A client that answers from a script, over the byte tokenizer, and remembers what it was asked.

Answers come from `answers` in the order of the calls, or from a function of the prompt's text; without either they are
made up: "answer N", or the smallest text that the constraint allows. An answer that violates its constraint fails the
test. Scores: `scores(prompt text, option text)` is the log-probability of the whole option, spread over its tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

import jsonschema
import msgspec

from sglite.errors import InvalidRequest, SgliteError
from sglite.protocol import (
    Coverage,
    FinishReason,
    GenerateRequest,
    GrammarSpec,
    ModelInfo,
    RequestOutput,
    ScoreOutput,
    ScoreRequest,
    TokenLogprob,
    Usage,
)
from sglite.text.types import TextTokenizer
from tests.fakes.tokenizer import EOS, ByteTokenizer

Answer = str | SgliteError
Script = Iterable[Answer] | Callable[[str], Answer]


class ScriptedClient:
    def __init__(
        self,
        answers: Script = (),
        *,
        scores: Callable[[str, str], float] | None = None,
        delay_s: float = 0.0,
        gather: int = 0,
        tokenizer: TextTokenizer | None = None,
        chunk: int = 4,
    ) -> None:
        """`delay_s` before each answer; a stream comes in pieces of `chunk` tokens with that delay between them. No
        generation is answered before `gather` of them have run at once (or 30 s have passed)."""
        self.tokenizer: TextTokenizer | None = tokenizer or ByteTokenizer()
        self.model_info = ModelInfo(name="scripted", vocab_size=self.tokenizer.vocab_size, has_chat_template=True)
        self.requests: list[GenerateRequest] = []
        self.score_requests: list[ScoreRequest] = []
        self.compiled: list[GrammarSpec] = []
        self.warmed: list[tuple[int, ...]] = []
        self.aborted: list[str] = []
        self.flushed = 0
        self.held: dict[str, tuple[int, ...]] = {}  # rows by request id, as token ids
        self.released: list[str] = []
        self.ended: list[str] = []
        self.continued: list[tuple[int, ...]] = []  # what came to a row that went on
        self.running = 0
        self.most_running = 0
        self._answers = answers if callable(answers) else iter(answers)
        self._scores = scores or (lambda prompt, option: -float(len(option)))
        self._delay_s = delay_s
        self._gather = gather
        self._gathered = asyncio.Event()
        self._chunk = chunk

    def text_of(self, prompt: str | tuple[int, ...]) -> str:
        assert self.tokenizer is not None
        return prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt)

    @property
    def prompts(self) -> list[str]:
        return [self.text_of(request.prompt) for request in self.requests]

    async def stream_request(self, request: GenerateRequest) -> AsyncIterator[RequestOutput]:
        assert self.tokenizer is not None
        request = self._whole(request)
        self.requests.append(request)
        number = len(self.requests)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        finished = False
        if self.running >= self._gather:
            self._gathered.set()
        try:
            if not self._gathered.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._gathered.wait(), 30)
            for index in range(request.sampling_params.n):
                answer = self._answer(request, number)
                await asyncio.sleep(self._delay_s)
                for output in self._outputs(request, index, answer):
                    yield output
                    if not output.finished:
                        await asyncio.sleep(self._delay_s)
            finished = True
        finally:
            self.running -= 1
            if not finished:
                self.aborted.append(request.request_id)

    async def score_request(self, request: ScoreRequest) -> ScoreOutput:
        assert self.tokenizer is not None
        request = self._whole(request)
        self.score_requests.append(request)
        if request.hold:
            assert isinstance(request.prompt, tuple)
            self.held[request.request_id] = request.prompt
        prompt = self.text_of(request.prompt)
        await asyncio.sleep(self._delay_s)
        rows = []
        for option in request.continuations:
            total = self._scores(prompt, self.tokenizer.decode(option))
            rows.append(tuple(total / len(option) for _ in option))
        return ScoreOutput(
            request_id=request.request_id, logprobs=tuple(rows), usage=Usage(prompt_tokens=len(request.prompt))
        )

    async def compile_grammar(self, spec: GrammarSpec) -> Coverage:
        self.compiled.append(spec)
        return Coverage(engine="scripted")

    async def warm_prefix(self, token_ids: tuple[int, ...], *, namespace: str = "", lease_s: float = 60.0) -> int:
        self.warmed.append(token_ids)
        return len(token_ids)

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    async def release(self, request_id: str) -> None:
        self.released.append(request_id)
        self.held.pop(request_id, None)

    async def end_program(self, program_id: str) -> None:
        self.ended.append(program_id)

    async def flush_cache(self) -> bool:
        self.flushed += 1
        return True

    def _whole(self, request: Any) -> Any:
        """With the tokens of the row that it continues."""
        if request.continue_from is None:
            return request
        if request.continue_from not in self.held:
            raise InvalidRequest("no such row", param="continue_from")
        assert isinstance(request.prompt, tuple)
        self.continued.append(request.prompt)
        prompt = self.held[request.continue_from][: request.keep] + request.prompt
        return msgspec.structs.replace(request, prompt=prompt)

    def _answer(self, request: GenerateRequest, number: int) -> str:
        if callable(self._answers):
            answer: Answer | None = self._answers(self.text_of(request.prompt))
        else:
            answer = next(self._answers, None)
        if isinstance(answer, SgliteError):
            raise answer
        if answer is None:
            answer = f"answer {number}" if request.grammar is None else smallest(request.grammar)
        if request.grammar is not None:
            check(request.grammar, answer)
        return answer

    def _outputs(self, request: GenerateRequest, index: int, answer: str) -> list[RequestOutput]:
        assert self.tokenizer is not None
        params = request.sampling_params
        ids = self.tokenizer.encode(answer)
        reason, matched = FinishReason.STOP, None
        if params.max_tokens is not None and len(ids) > params.max_tokens:
            ids, reason = ids[: params.max_tokens], FinishReason.LENGTH
        text = self.tokenizer.decode(ids)
        for stop in params.stop:
            if stop in text:
                text, matched, reason = text[: text.index(stop)], stop, FinishReason.STOP
                ids = self.tokenizer.encode(text + stop)
        if reason is FinishReason.STOP and matched is None:
            ids = [*ids, EOS]
        usage = Usage(prompt_tokens=len(request.prompt), completion_tokens=len(ids))
        size = max(1, self._chunk) if request.stream else max(1, len(ids))
        outputs = []
        if request.hold:
            assert isinstance(request.prompt, tuple)
            self.held[request.request_id] = request.prompt + tuple(i for i in ids if i != EOS)
        for start in range(0, max(1, len(ids)), size):
            last = start + size >= len(ids)
            part = ids[start : start + size]
            logprobs: tuple[TokenLogprob, ...] = ()
            if params.logprobs is not None:
                logprobs = tuple(TokenLogprob(t, -0.5, tuple((t, -0.5) for _ in range(params.logprobs))) for t in part)
            outputs.append(
                RequestOutput(
                    request_id=request.request_id,
                    index=index,
                    text=text[start:] if last else text[start : start + size],
                    token_ids=tuple(i for i in part if i != EOS),
                    prompt_token_ids=tuple(request.prompt)
                    if start == 0 and not isinstance(request.prompt, str)
                    else (),
                    logprobs=logprobs,
                    finish_reason=reason if last else None,
                    matched_stop=matched if last else None,
                    usage=usage,
                )
            )
        return outputs


def check(grammar: GrammarSpec, text: str) -> None:
    """Loosely: enough to catch a constraint that got lost or mixed up."""
    match grammar.kind:
        case "json_schema":
            jsonschema.validate(json.loads(text), json.loads(grammar.source))
        case "json_object":
            assert isinstance(json.loads(text), dict)
        case "regex":
            assert re.fullmatch(grammar.source, text), f"{text!r} does not match {grammar.source!r}"
        case "choice":
            assert text in json.loads(grammar.source)
        case _:
            pass


def smallest(grammar: GrammarSpec) -> str:
    match grammar.kind:
        case "json_schema":
            schema = json.loads(grammar.source)
            return json.dumps(_instance(schema, schema), separators=(",", ":"))
        case "json_object":
            return "{}"
        case "choice":
            return str(json.loads(grammar.source)[0])
        case "regex":
            for candidate in ("1", "True", '"a"', "a", "ab", "1.5", "2024-01-01", "12:30", "a@b.com", "192.168.0.1"):
                if re.fullmatch(grammar.source, candidate):
                    return candidate
    raise AssertionError(f"the script has no answer for {grammar}")


def _instance(schema: Any, root: Any) -> Any:
    if "$ref" in schema:
        target = root
        for part in schema["$ref"].removeprefix("#/").split("/"):
            target = target[part]
        return _instance(target, root)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][0]
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return _instance(schema[key][0], root)
    kinds: Sequence[str] | str = schema.get("type", "object")
    match kinds if isinstance(kinds, str) else kinds[0]:
        case "object":
            required = schema.get("required", ())
            return {k: _instance(v, root) for k, v in schema.get("properties", {}).items() if k in required}
        case "array":
            return [_instance(schema.get("items", {"type": "integer"}), root)] * schema.get("minItems", 0)
        case "string" if "pattern" in schema:
            return smallest(GrammarSpec(kind="regex", source=schema["pattern"]))
        case "string":
            return "a" * max(1, schema.get("minLength", 1))
        case "integer" | "number":
            return schema.get("minimum", schema.get("exclusiveMinimum", 0) + 1)
        case "boolean":
            return True
        case _:
            return None
