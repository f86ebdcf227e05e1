"""An EngineCore that answers from a script, one byte token a step, for tests of what lies around the core."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from sglite.errors import InvalidGrammar, InvalidRequest, ModelNotFound, SgliteError
from sglite.protocol import (
    Coverage,
    CoverageItem,
    ErrorInfo,
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
from sglite.runtime.async_engine import Engine
from sglite.runtime.async_engine.front import Front
from sglite.runtime.async_engine.thread import Built, ThreadBack
from sglite.runtime.config import EngineConfig
from tests.fakes.tokenizer import EOS, ByteTokenizer

Script = Callable[[GenerateRequest, int], str | SgliteError]


@dataclass
class _Completion:
    request: GenerateRequest
    index: int
    answer: bytes
    sent: int = 0
    held: list[int] = field(default_factory=list)


def echo(request: GenerateRequest, index: int) -> str:
    """The script that says the prompt's text again."""
    assert not isinstance(request.prompt, str)
    return ByteTokenizer().decode(request.prompt)


class ScriptedCore:
    """Every running completion gets one byte of its scripted answer in each step; all requests run at once."""

    def __init__(self, script: Script = echo, *, step_s: float = 0.0) -> None:
        self.script = script
        self.step_s = step_s
        self.requests: list[GenerateRequest | ScoreRequest] = []
        self.aborted: list[str] = []
        self.released: list[str] = []
        self.ended: list[str] = []
        self.closed = False
        self.steps = 0  # begun
        self.rests = 0
        self.wanted_rests = 1  # that it asks for
        self.fail_next_step: Exception | None = None
        self._running: list[_Completion] = []
        self._ready: list[RequestOutput | ScoreOutput] = []

    def add(self, request: GenerateRequest | ScoreRequest) -> None:
        if not request.prompt:
            raise InvalidRequest("the prompt is empty", param="prompt")
        if request.continue_from is not None:
            raise InvalidRequest("no row is held here", param="continue_from")
        self.requests.append(request)
        if isinstance(request, ScoreRequest):
            scores = tuple(tuple(-float(t) for t in ids) for ids in request.continuations)
            self._ready.append(ScoreOutput(request_id=request.request_id, logprobs=scores))
            return
        for index in range(request.sampling_params.n):
            answer = self.script(request, index)
            if isinstance(answer, SgliteError):
                self._ready.append(_error(request.request_id, index, answer))
            else:
                self._running.append(_Completion(request, index, answer.encode()))

    def abort(self, request_id: str, reason: str = "aborted") -> None:
        for completion in [c for c in self._running if c.request.request_id == request_id]:
            self._running.remove(completion)
            self.aborted.append(request_id)
            self._ready.append(
                RequestOutput(
                    request_id=request_id, index=completion.index, finish_reason=FinishReason.ABORT, reason=reason
                )
            )

    def release(self, request_id: str) -> None:
        self.released.append(request_id)

    def end_program(self, program_id: str) -> None:
        self.ended.append(program_id)

    def warm_prefix(
        self, request_id: str, token_ids: Sequence[int], *, namespace: str = "", lease_s: float = 60.0
    ) -> None:
        usage = Usage(prompt_tokens=len(token_ids))
        self._ready.append(RequestOutput(request_id=request_id, finish_reason=FinishReason.STOP, usage=usage))

    def flush_cache(self) -> bool:
        return not self._running

    def set_waker(self, waker: Callable[[], None]) -> None:
        self.waker = waker

    def set_pauses(self, rest: Callable[[], None], work: Callable[[], None]) -> None:
        """It waits for no device."""

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._ready or self.fail_next_step)

    @property
    def next_deadline(self) -> float | None:
        return None

    @property
    def num_running(self) -> int:
        return len(self._running)

    def step(self) -> list[RequestOutput | ScoreOutput]:
        if self.fail_next_step is not None:
            raise self.fail_next_step
        self.steps += 1
        if self.step_s and self._running:
            time.sleep(self.step_s)
        outputs, self._ready = self._ready, []
        for completion in list(self._running):
            outputs += self._advance(completion)
        return outputs

    def rest(self) -> bool:
        self.rests += 1
        return self.rests < self.wanted_rests

    def close(self) -> None:
        self.closed = True

    def _advance(self, completion: _Completion) -> list[RequestOutput]:
        request, params = completion.request, completion.request.sampling_params
        limit = len(completion.answer) if params.max_tokens is None else params.max_tokens
        ids: list[int] = []
        reason = None
        if completion.sent < min(limit, len(completion.answer)):
            ids = [completion.answer[completion.sent]]
            completion.sent += 1
        if completion.sent >= len(completion.answer):
            reason = FinishReason.STOP
        elif completion.sent >= limit:
            reason = FinishReason.LENGTH
        completion.held += ids
        text = _whole_characters(completion.held, last=reason is not None)
        if not request.stream and reason is None:
            completion.held = completion.held if text is None else [*completion.held]
            return []
        if text is None:
            return []
        ids, completion.held = completion.held, []
        if reason is not None:
            self._running.remove(completion)
        return [
            RequestOutput(
                request_id=request.request_id,
                index=completion.index,
                text=text,
                token_ids=tuple(ids),
                finish_reason=reason,
                matched_stop=EOS if reason is FinishReason.STOP else None,
                logprobs=_logprobs(ids, params.logprobs),
                usage=Usage(prompt_tokens=len(request.prompt), completion_tokens=completion.sent),
                coverage=_coverage(request) if reason is not None else None,
            )
        ]


class ScriptedGrammars:
    """Compiles nothing; a spec whose source is "bad" is refused."""

    filler: Any = None

    def compile(self, spec: GrammarSpec) -> Future[Any]:
        future: Future[Any] = Future()
        if spec.source == "bad":
            future.set_exception(InvalidGrammar("bad grammar"))
        else:
            future.set_result(_Compiled(spec))
        return future

    def heal(self, token_id: int, inner: Any) -> Any:
        return inner


@dataclass
class _Compiled:
    spec: GrammarSpec
    coverage: Coverage = Coverage(engine="scripted")


def scripted_engine(
    script: Script = echo,
    *,
    step_s: float = 0.0,
    core: ScriptedCore | None = None,
    tokenizer: ByteTokenizer | None = None,
) -> Engine:
    """An Engine whose loop runs on a thread over a ScriptedCore (reachable as `engine.core`)."""
    front = Front()
    core = core or ScriptedCore(script, step_s=step_s)
    tokenizer = tokenizer or ByteTokenizer()
    info = ModelInfo(
        name="scripted",
        architecture="Scripted",
        vocab_size=tokenizer.vocab_size,
        max_model_len=4096,
        bos_token_id=tokenizer.bos_token_id,
        stop_token_ids=tokenizer.stop_token_ids,
        has_chat_template=True,
    )
    built = Built(core, ScriptedGrammars(), tokenizer, info, lambda: {"running": core.num_running}, lambda: None)  # type: ignore[arg-type]
    back = ThreadBack(lambda: built, front)
    back.start()
    engine = Engine.over(front, back, tokenizer, info)
    engine.core = core  # type: ignore[attr-defined]
    return engine


def _whole_characters(ids: list[int], *, last: bool) -> str | None:
    """The text of byte tokens, or None while the last character is not complete."""
    try:
        return bytes(ids).decode()
    except UnicodeDecodeError:
        return bytes(ids).decode(errors="replace") if last else None


def _coverage(request: GenerateRequest) -> Coverage | None:
    """A grammar that may leave something to be validated says that it did."""
    if request.grammar is None or request.grammar.on_unsupported == "error":
        return None
    return Coverage((CoverageItem("/not", "not", "validated"),), engine="scripted")


def _logprobs(ids: list[int], top: int | None) -> tuple[TokenLogprob, ...]:
    if top is None:
        return ()
    return tuple(TokenLogprob(t, -0.5, tuple(((t + k) % 256, -0.5 - k) for k in range(top))) for t in ids)


def _error(request_id: str, index: int, error: SgliteError) -> RequestOutput:
    return RequestOutput(
        request_id=request_id, index=index, finish_reason=FinishReason.ERROR, error=ErrorInfo.of(error)
    )


def build_scripted(config: EngineConfig, progress: Callable[[str], None]) -> Built:
    """A builder for an engine process. `served_name` chooses: "slow" takes 10 ms a step, "fail" cannot be built."""
    progress("loading the script")
    if config.served_name == "fail":
        raise ModelNotFound("no such model")
    core = ScriptedCore(step_s=0.01 if config.served_name == "slow" else 0.0)
    info = ModelInfo(name="scripted", vocab_size=ByteTokenizer.vocab_size, max_model_len=4096)
    stats = {"running": 0}
    return Built(core, ScriptedGrammars(), ByteTokenizer(), info, lambda: stats, lambda: None)  # type: ignore[arg-type]
