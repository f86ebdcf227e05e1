"""Programs on a remote server that speaks SGLang's `/generate`: `sglite serve`, or SGLang's own.

With the model's tokenizer at hand (`tokenizer=`, or a folder that the server names and this machine has) the state is
kept as token ids, as with an Engine. Without it the state is text, and chat roles cannot be rendered.

What `/generate` cannot carry is refused: constraints are never dropped on the way. An sglite server takes more than
SGLang's fields: boundaries are healed there, and it knows which program a call belongs to.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec

from sglite.errors import BackendError, InvalidRequest
from sglite.lang.backends.http import Http, NotThisApi, known_shape
from sglite.lang.backends.sessions import ServerSessions
from sglite.protocol import (
    Coverage,
    FinishReason,
    GenerateRequest,
    GrammarSpec,
    GraphAnswer,
    GraphRun,
    ModelInfo,
    ProgramRef,
    RequestOutput,
    SamplingParams,
    ScoreOutput,
    ScoreRequest,
    TokenLogprob,
    Usage,
)
from sglite.text.types import TextTokenizer

_PROBE = "a"

# SamplingParams field -> SGLang's name
_NAMES = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    **{
        name: name
        for name in (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "stop",
            "stop_regex",
            "stop_token_ids",
            "ignore_eos",
            "skip_special_tokens",
            "n",
        )
    },
}


def _model_info(http: Http) -> Any:
    try:
        return http.get_now("/get_model_info")
    except NotThisApi as error:
        raise NotThisApi(
            f"{http.base_url} is neither an sglite nor an SGLang server: {error}. Give the address that `sglite serve` "
            "listens at, with no path behind it: http://127.0.0.1:30000. For another server with OpenAI's API there is "
            "sglite.OpenAI(MODEL, base_url=...)"
        ) from error


class RuntimeEndpoint:
    """Satisfies `sglite.lang.client.Client`. Raises BackendError when the server does not answer.

    An sglite server keeps the state of each program (sessions.py), where this side has the tokenizer.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        verify: Any = True,
        chat_template_name: str | None = None,
        *,
        tokenizer: TextTokenizer | str | Path | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        if chat_template_name is not None:
            raise InvalidRequest(
                "the chat template comes with the tokenizer: give tokenizer=FOLDER", param="chat_template_name"
            )
        self._http = Http(base_url, api_key=api_key, timeout_s=timeout_s, verify=True if verify is None else verify)
        info = _model_info(self._http)
        with known_shape():
            self._is_sglite = self.shares_prompts = info.get("server") == "sglite"
            self.model_info = ModelInfo(
                name=str(info.get("model_path", "")),
                vocab_size=int(info.get("vocab_size") or 0),
                max_model_len=int(info.get("max_model_len") or 0),
                has_chat_template=bool(info.get("has_chat_template", True)),
            )
            keeps_programs = bool(info.get("programs"))
            self._runs_graphs = bool(info.get("graphs"))
        self.tokenizer: TextTokenizer | None = _tokenizer(tokenizer, info.get("tokenizer_path"))
        keeps_programs = keeps_programs and self.tokenizer is not None
        self._sessions = ServerSessions(self._http) if keeps_programs else None
        self.holds_rows = self.takes_followers = keeps_programs

    @property
    def base_url(self) -> str:
        return self._http.base_url

    def close(self) -> None:
        """Close the connections."""
        if self._sessions is not None:
            self._sessions.close()
        self._http.close()

    def get_model_name(self) -> str:
        return self.model_info.name

    async def stream_request(self, request: GenerateRequest) -> AsyncGenerator[RequestOutput]:
        if self._sessions is not None and request.program is not None:
            async with aclosing(self._sessions.stream(request)) as outputs:
                async for output in outputs:
                    yield output
            return
        body = _generate_body(request) | self._own_fields(request)
        if not request.stream:
            answers = await self._http.post("/generate", body)
            with known_shape():
                for index, answer in enumerate(answers if isinstance(answers, list) else [answers]):
                    yield _Cumulative(request, index).output(answer)
            return
        seen = [_Cumulative(request, index) for index in range(request.sampling_params.n)]
        with known_shape():
            async for answer in self._http.events("/generate", body):
                index = int(answer.get("index") or 0)
                if not 0 <= index < len(seen):
                    raise BackendError(f"the backend answered completion {index} of {len(seen)}")
                yield seen[index].output(answer)

    async def run_graph(self, run: GraphRun) -> AsyncGenerator[GraphAnswer]:
        """Raises BackendError where the server cannot."""
        if not self._runs_graphs:
            raise BackendError("this server runs no graphs")
        body = msgspec.json.encode(run)
        async with aclosing(self._http.events("/programs/run", body)) as events:
            async for found in events:
                with known_shape():
                    answer = msgspec.convert(found, GraphAnswer)
                yield answer

    async def score_request(self, request: ScoreRequest) -> ScoreOutput:
        """One HTTP request for all options. The server computes the shared prompt once."""
        if self._sessions is not None and request.program is not None:
            return await self._sessions.score(request)  # where it goes on from a row, its own prompt may be empty
        if isinstance(request.prompt, str) or not request.prompt:
            raise InvalidRequest("scoring needs token ids: give RuntimeEndpoint(tokenizer=FOLDER)")
        body = {
            "input_ids": [[*request.prompt, *option] for option in request.continuations],
            "sampling_params": {"max_new_tokens": 0, "temperature": 0},
            "return_logprob": True,
            "logprob_start_len": len(request.prompt) - 1,
        }
        if self._is_sglite and request.program is not None:
            body["program"] = _program(request.program)
        answers = await self._http.post("/generate", body)
        with known_shape():
            return _scored(request, answers)

    async def compile_grammar(self, spec: GrammarSpec) -> Coverage:
        """By asking for nothing under the constraint: a server that refuses it does so here."""
        body = {"text": _PROBE, "sampling_params": {"max_new_tokens": 0, **_constraint(spec)}, **self._options(spec)}
        await self._http.post("/generate", body)
        return Coverage(engine=self.base_url)

    async def warm_prefix(self, token_ids: tuple[int, ...], *, namespace: str = "", lease_s: float = 60.0) -> int:
        """The server keeps what it computed as long as its cache allows."""
        body = {"input_ids": list(token_ids), "sampling_params": {"max_new_tokens": 0}}
        answer = await self._http.post("/generate", body)
        with known_shape():
            return _count(answer["meta_info"], "prompt_tokens")

    async def abort(self, request_id: str) -> None:
        await self._http.tell("/abort_request", {"rid": request_id})

    async def release(self, request_id: str) -> None:
        if self._sessions is not None:
            self._sessions.release(request_id)

    async def end_program(self, program_id: str) -> None:
        if self._sessions is not None:
            await self._sessions.end(program_id)

    async def flush_cache(self) -> bool:
        await self._http.tell("/flush_cache", {})
        return True

    def _own_fields(self, request: GenerateRequest) -> dict[str, Any]:
        """What only an sglite server takes. Raises InvalidRequest where another one would drop a wish."""
        fields = {} if request.grammar is None else self._options(request.grammar)
        if not self._is_sglite:
            if request.close_on_budget:
                raise InvalidRequest("this server takes no close_on_budget", param="close_on_budget")
            return fields
        if request.program is not None:
            fields["program"] = _program(request.program)
        return {**fields, "heal": request.heal, "close_on_budget": request.close_on_budget}

    def _options(self, spec: GrammarSpec) -> dict[str, Any]:
        if self._is_sglite:
            return {"whitespace": spec.whitespace, "on_unsupported": spec.on_unsupported}
        if spec.on_unsupported != "error" or spec.whitespace != "compact":
            raise InvalidRequest("this server takes on_unsupported and whitespace at their defaults only")
        return {}


def _scored(request: ScoreRequest, answers: Any) -> ScoreOutput:
    """Raises BackendError for the log-probabilities of anything but the options."""
    rows: list[tuple[float, ...]] = []
    usage = Usage()
    for option, answer in zip(request.continuations, answers, strict=True):
        meta = answer["meta_info"]
        entries = meta["input_token_logprobs"][-len(option) :]
        if [entry[1] for entry in entries] != list(option) or any(entry[0] is None for entry in entries):
            raise BackendError("the backend's log-probabilities are not those of the options")
        rows.append(tuple(entry[0] for entry in entries))
        usage = Usage(
            prompt_tokens=len(request.prompt), cached_tokens=min(len(request.prompt), _count(meta, "cached_tokens"))
        )
    return ScoreOutput(request_id=request.request_id, logprobs=tuple(rows), usage=usage)


class _Cumulative:
    """The server tells everything so far each time; the program wants what is new."""

    def __init__(self, request: GenerateRequest, index: int) -> None:
        self._request = request
        self._index = index
        self._text = ""
        self._ids = self._logprobs = 0

    def output(self, answer: dict[str, Any]) -> RequestOutput:
        """Raises BackendError for an answer that the server gave up, and for one that takes text back."""
        meta = answer["meta_info"]
        reason, matched = _finish(meta.get("finish_reason"))
        text, ids = answer["text"], list(answer.get("output_ids") or ())
        if not isinstance(text, str):
            raise BackendError(f"the backend's answer is in an unknown shape: its text is {text!r}")
        if reason is None:
            text = text[: len(text) - _begun_stop(text, self._request.sampling_params.stop)]
        if not text.startswith(self._text):
            raise BackendError("the backend took back text that it had sent")
        logprobs = _logprobs(meta, "output")
        made = RequestOutput(
            request_id=self._request.request_id,
            index=self._index,
            text=text[len(self._text) :],
            token_ids=tuple(ids[self._ids :]),
            finish_reason=reason,
            matched_stop=matched,
            logprobs=tuple(entry for entry in logprobs[self._logprobs :] if entry is not None),
            prompt_logprobs=() if self._logprobs or self._text else tuple(_logprobs(meta, "input")),
            usage=Usage(
                prompt_tokens=_count(meta, "prompt_tokens"),
                cached_tokens=_count(meta, "cached_tokens"),
                completion_tokens=_count(meta, "completion_tokens"),
                forced_tokens=_count(meta, "forced_tokens"),
            ),
        )
        self._text, self._ids, self._logprobs = text, len(ids), len(logprobs)
        return made


def _begun_stop(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end may be the beginning of a stop text: SGLang cuts it off when it is complete."""
    sizes = (size for stop in stops for size in range(len(stop) - 1, 0, -1) if text.endswith(stop[:size]))
    return max(sizes, default=0)


def _generate_body(request: GenerateRequest) -> dict[str, Any]:
    params = request.sampling_params
    if request.grammar_after or request.continue_from is not None:
        raise InvalidRequest("a remote server takes no grammar_after or continue_from")
    sampling = _sampling(params)
    if request.grammar is not None:
        sampling |= _constraint(request.grammar)
    prompt: dict[str, Any] = (
        {"text": request.prompt} if isinstance(request.prompt, str) else {"input_ids": list(request.prompt)}
    )
    body: dict[str, Any] = {
        **prompt,
        "sampling_params": sampling,
        "stream": request.stream,
        "rid": request.request_id,
    }
    if params.logprobs is not None or params.prompt_logprobs is not None:
        body["return_logprob"] = True
        body["top_logprobs_num"] = max(params.logprobs or 0, params.prompt_logprobs or 0)
        body["logprob_start_len"] = -1 if params.prompt_logprobs is None else 0
    return body


def _program(program: ProgramRef) -> dict[str, Any]:
    return {
        "program_id": program.program_id,
        "parent": program.parent,
        "remaining": program.remaining,
        "siblings": program.siblings,
        "wanted_again": program.wanted_again,
    }


def _sampling(params: SamplingParams) -> dict[str, Any]:
    if params.include_stop:
        raise InvalidRequest("a remote server takes no include_stop", param="include_stop")
    neutral = SamplingParams()
    found: dict[str, Any] = {}
    for field, name in _NAMES.items():
        value = getattr(params, field)
        if value != getattr(neutral, field):
            found[name] = list(value) if isinstance(value, tuple) else value
    if params.logit_bias:
        found["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
    return found


def _constraint(spec: GrammarSpec) -> dict[str, Any]:
    """In the words of `/generate`. Raises InvalidRequest for what it has no words for."""
    match spec.kind:
        case "json_schema" | "regex" | "ebnf" | "structural_tag":
            return {spec.kind: spec.source}
        case "json_object":
            return {"json_schema": '{"type":"object"}'}
        case "choice":
            return {"regex": "|".join(f"({re.escape(option)})" for option in json.loads(spec.source))}
        case _:
            raise InvalidRequest(f"a remote server takes no {spec.kind} constraint", param=spec.kind)


def _finish(given: Any) -> tuple[FinishReason | None, str | int | None]:
    """Raises BackendError for an answer that the server gave up."""
    if given is None:
        return None, None
    kind = given.get("type") if isinstance(given, dict) else str(given)
    if kind == "abort":
        said = given.get("message") if isinstance(given, dict) else None
        raise BackendError(str(said or "the server gave the request up"))
    matched = given.get("matched") if isinstance(given, dict) else None
    try:
        return FinishReason(str(kind)), matched
    except ValueError:
        return FinishReason.STOP, matched


def _logprobs(meta: dict[str, Any], which: str) -> Sequence[TokenLogprob | None]:
    rows = meta.get(f"{which}_token_logprobs") or []
    tops = meta.get(f"{which}_top_logprobs") or [None] * len(rows)
    return [
        None
        if row[0] is None
        else TokenLogprob(int(row[1]), float(row[0]), tuple((int(t[1]), float(t[0])) for t in top or ()))
        for row, top in zip(rows, tops, strict=False)
    ]


def _count(meta: dict[str, Any], name: str) -> int:
    return int(meta.get(name) or 0)


def _tokenizer(given: TextTokenizer | str | Path | None, told: Any) -> TextTokenizer | None:
    if given is not None and not isinstance(given, str | Path):
        return given
    folder = Path(given) if given is not None else Path(str(told or ""))
    if given is None:
        with known_shape():
            if not (folder / "tokenizer.json").is_file():
                return None
    from sglite.text.tokenizer import Tokenizer  # the tokenizers library, which text mode does not need

    return Tokenizer.from_folder(folder)
