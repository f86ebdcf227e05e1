"""`sglite.Engine`: a model and everything that runs it, as one object.

The step loop runs on a thread of this process, or with `process=True` in a process of its own. Any number of threads
and event loops may call one Engine at once.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import uuid
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Literal, Protocol, Self

import msgspec

from sglite.errors import EngineDead, InvalidRequest, RequestAborted, did_you_mean
from sglite.protocol import (
    Coverage,
    ErrorInfo,
    FinishReason,
    GenerateRequest,
    GrammarSpec,
    ModelInfo,
    OnUnsupported,
    RequestOutput,
    SamplingParams,
    ScoreOutput,
    ScoreRequest,
    Whitespace,
    merge_outputs,
)
from sglite.runtime.async_engine import messages as m
from sglite.runtime.async_engine.arguments import (
    Prompt,
    Sampling,
    checked_id_lists,
    checked_ids,
    grammar,
    is_single,
    one_grammar,
    sampling_params,
    split_truncate,
)
from sglite.runtime.async_engine.checks import checked_fields, checked_grammar, checked_seconds, checked_text
from sglite.runtime.async_engine.delivery import Item, LoopSink, Sink, ThreadSink
from sglite.runtime.async_engine.front import Front
from sglite.runtime.async_engine.outbox import Outbox
from sglite.runtime.config import EngineConfig
from sglite.runtime.device.threads import limit_spinning
from sglite.runtime.stop import compile_stop_regex
from sglite.text.types import TextTokenizer

Messages = Sequence[Mapping[str, Any]]
OnError = Literal["raise", "return"]


class Back(Protocol):
    """Where the step loop is."""

    def send(self, commands: list[m.Command]) -> None: ...

    def close(self) -> None: ...


class Engine:
    """Answers prompts with one model. Satisfies `sglite.lang.client.Client`.

    `options` are the fields of EngineConfig (SGLang's names for them work too). `process=True` runs the step loop in
    a process of its own; `restart=True` starts that process again when it dies (requests it had end with EngineDead).

    Raises ModelNotFound, UnsupportedModel or InvalidRequest when the model cannot be used.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        config: EngineConfig | None = None,
        process: bool = False,
        restart: bool = False,
        on_progress: Callable[[str], None] | None = None,
        **options: Any,
    ) -> None:
        self.config = _config(model, config, options)
        front = Front()
        front.on_progress = on_progress
        if process:
            # Imports here and below: one way must not load what the other needs (the front of a process has no torch).
            from sglite.runtime.async_engine.process import ProcessBack

            back = ProcessBack(self.config, front, restart=restart)
            started = back.start()
            self._attach(front, back, started.tokenizer, started.model_info, started.facts)
        else:
            limit_spinning()
            from sglite.runtime.async_engine.build import build
            from sglite.runtime.async_engine.thread import ThreadBack

            config_ = self.config
            thread = ThreadBack(lambda: build(config_, front.progress), front)
            built = thread.start()
            self._attach(front, thread, built.tokenizer, built.model_info, built.facts)

    @classmethod
    def over(cls, front: Front, back: Back, tokenizer: TextTokenizer, model_info: ModelInfo) -> Self:
        """An Engine on a running back: for tests, and for cores that are put together by hand."""
        engine = cls.__new__(cls)
        engine.config = EngineConfig()
        engine._attach(front, back, tokenizer, model_info, {})
        return engine

    def _attach(
        self, front: Front, back: Back, tokenizer: TextTokenizer, model_info: ModelInfo, facts: dict[str, Any]
    ) -> None:
        self.tokenizer: TextTokenizer = tokenizer
        self.model_info = model_info
        self.facts = facts
        self._front = front
        self._back = back
        self._outbox = Outbox(back.send)
        self._pid = os.getpid()
        self._prefix = uuid.uuid4().hex[:12]
        self._numbers = itertools.count()
        # Closes when the object is collected and, at the latest, when the interpreter exits.
        self._finalizer = weakref.finalize(self, back.close)

    # One answer at a time, or a list of them

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt] | None = None,
        sampling: Sampling | Sequence[Sampling] = None,
        *,
        sampling_params: Sampling | Sequence[Sampling] = None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        json_schema: Any = None,
        regex: str | None = None,
        choices: Sequence[str] | None = None,
        ebnf: str | None = None,
        constraint: GrammarSpec | None = None,
        whitespace: Whitespace = "compact",
        on_unsupported: OnUnsupported = "error",
        on_error: OnError = "raise",
        truncate_prompt: bool = False,
    ) -> Any:
        """Complete one prompt (a RequestOutput; a list of them with n > 1) or several (a list, in order; [] for []).

        `sampling`, also under SGLang's name `sampling_params`: one for all prompts, or a list with one for each. With
        on_error="return" a failed prompt of a list gives an output with `error` in place of ending the call.
        `truncate_prompt`, also in the dict of `sampling`: of a prompt that is too long, keep the last tokens that fit.
        """
        spec = _constraint(constraint, json_schema, regex, choices, ebnf, whitespace, on_unsupported)
        prompts, single = _prompts(prompt, input_ids)
        given = sampling if sampling is not None else sampling_params
        requests = self._requests(prompts, given, spec, truncate=truncate_prompt)
        answers = self._answers(requests, on_error)
        return answers[0] if single else answers

    async def generate_async(
        self,
        prompt: Prompt | Sequence[Prompt] | None = None,
        sampling: Sampling | Sequence[Sampling] = None,
        *,
        sampling_params: Sampling | Sequence[Sampling] = None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        json_schema: Any = None,
        regex: str | None = None,
        choices: Sequence[str] | None = None,
        ebnf: str | None = None,
        constraint: GrammarSpec | None = None,
        whitespace: Whitespace = "compact",
        on_unsupported: OnUnsupported = "error",
        on_error: OnError = "raise",
        truncate_prompt: bool = False,
    ) -> Any:
        """`generate` for coroutines. Cancelling it aborts its requests."""
        spec = _constraint(constraint, json_schema, regex, choices, ebnf, whitespace, on_unsupported)
        prompts, single = _prompts(prompt, input_ids)
        given = sampling if sampling is not None else sampling_params
        requests = self._requests(prompts, given, spec, truncate=truncate_prompt)
        answers = await self._answers_async(requests, on_error)
        return answers[0] if single else answers

    def stream(
        self,
        prompt: Prompt,
        sampling: Sampling = None,
        *,
        json_schema: Any = None,
        regex: str | None = None,
        choices: Sequence[str] | None = None,
        ebnf: str | None = None,
        constraint: GrammarSpec | None = None,
        truncate_prompt: bool = False,
    ) -> Iterator[RequestOutput]:
        """Pieces of the answer as they come. Closing the iterator aborts the request."""
        spec = _constraint(constraint, json_schema, regex, choices, ebnf, "compact", "error")
        (request,) = self._requests(_one(prompt), sampling, spec, stream=True, truncate=truncate_prompt)
        return self._pieces(request)

    def stream_async(
        self,
        prompt: Prompt,
        sampling: Sampling = None,
        *,
        json_schema: Any = None,
        regex: str | None = None,
        choices: Sequence[str] | None = None,
        ebnf: str | None = None,
        constraint: GrammarSpec | None = None,
        truncate_prompt: bool = False,
    ) -> AsyncGenerator[RequestOutput, None]:
        """`stream` for coroutines."""
        spec = _constraint(constraint, json_schema, regex, choices, ebnf, "compact", "error")
        (request,) = self._requests(_one(prompt), sampling, spec, stream=True, truncate=truncate_prompt)
        return self.stream_request(request)

    def chat(self, messages: Messages, sampling: Sampling = None, **options: Any) -> Any:
        """`generate` on the chat template's text of `messages` ([{"role": ..., "content": ...}, ...])."""
        # As ids: the template writes the begin token itself where one belongs.
        return self.generate(self.tokenizer.encode(self.tokenizer.render_chat(messages)), sampling, **options)

    def score(self, prompt: Prompt, continuations: Sequence[Prompt]) -> ScoreOutput:
        """Log-probability of every token of each continuation, given the prompt."""
        request = self._score_request(prompt, continuations)
        sink = ThreadSink()
        self._submit(request, sink)
        try:
            output = _checked(sink.get())
        finally:
            self._drop(request.request_id, sink)
        assert isinstance(output, ScoreOutput)
        return output

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def stats(self) -> dict[str, Any]:
        """Counters and sizes of the engine, as the server's /metrics shows them."""
        return self._call(m.Stats).result()

    # The Client protocol

    takes_followers = True

    def after_you(self) -> None:
        """Work that can wait for a moment lets the engine's step loop go first, where that shares this process."""
        self._front.courtesy.after_you()

    async def stream_request(self, request: GenerateRequest) -> AsyncGenerator[RequestOutput, None]:
        sink = self._front.mailboxes.sink()
        self._post(request, sink)
        try:
            left = request.sampling_params.n
            while left:
                output = _checked(await sink.get())
                assert isinstance(output, RequestOutput)
                left -= output.finished
                yield output
        finally:
            self._drop(request.request_id, sink)

    async def score_request(self, request: ScoreRequest) -> ScoreOutput:
        sink = self._front.mailboxes.sink()
        self._post(request, sink)
        try:
            output = _checked(await sink.get())
        finally:
            self._drop(request.request_id, sink)
        assert isinstance(output, ScoreOutput)
        return output

    async def compile_grammar(self, spec: GrammarSpec) -> Coverage:
        spec = checked_grammar(spec)
        value = await asyncio.wrap_future(self._call(lambda number: m.CompileGrammar(number, spec)))
        return msgspec.convert(value, Coverage)

    async def warm_prefix(self, token_ids: tuple[int, ...], *, namespace: str = "", lease_s: float = 60.0) -> int:
        self._check_process()
        ids = checked_ids(token_ids, "token_ids")
        namespace, lease_s = checked_text(namespace, "namespace"), checked_seconds(lease_s, "lease_s")
        request_id = self.new_request_id()
        sink = self._front.mailboxes.sink()
        self._front.router.register(request_id, sink)
        self._outbox.send([m.WarmPrefix(request_id, ids, namespace, lease_s)])
        try:
            output = _checked(await sink.get())
        finally:
            self._drop(request_id, sink)
        assert isinstance(output, RequestOutput)
        return output.usage.prompt_tokens

    async def abort(self, request_id: str) -> None:
        self.abort_nowait(request_id)

    def abort_nowait(self, request_id: str) -> None:
        """End a request; whoever waits for it gets RequestAborted. A no-op for unknown and finished ids."""
        self._outbox.send([m.Abort(checked_text(request_id, "request_id"))])

    async def release(self, request_id: str) -> None:
        self._outbox.post([m.Release(checked_text(request_id, "request_id"))])

    async def end_program(self, program_id: str) -> None:
        self._outbox.post([m.EndProgram(checked_text(program_id, "program_id"))])

    async def flush_cache(self) -> bool:
        return bool(await asyncio.wrap_future(self._call(m.FlushCache)))

    async def stats_async(self) -> dict[str, Any]:
        return await asyncio.wrap_future(self._call(m.Stats))

    def new_request_id(self) -> str:
        return f"{self._prefix}-{next(self._numbers)}"

    @property
    def alive(self) -> bool:
        """It takes requests. False while it is down or closed."""
        return self._front.router.failure is None

    # Its life

    def close(self) -> None:
        """Abort what runs and free the model. Idempotent."""
        self._finalizer()

    def shutdown(self) -> None:
        """`close`, under SGLang's name."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, make: Callable[[int], m.Command]) -> Future[Any]:
        self._check_process()
        number, future = self._front.new_call()
        self._outbox.send([make(number)])
        return future

    def _submit(self, request: GenerateRequest | ScoreRequest, sink: ThreadSink) -> None:
        """For a thread that blocks until the answer is there."""
        self._outbox.send([self._registered(request, sink)])

    def _post(self, request: GenerateRequest | ScoreRequest, sink: LoopSink) -> None:
        """For a coroutine: together with what others of its event loop ask now."""
        self._outbox.post([self._registered(request, sink)])

    def _registered(
        self, request: GenerateRequest | ScoreRequest, sink: Sink, *, ids_checked: bool = False
    ) -> m.Command:
        """`ids_checked`: a prompt of ids is one that `_requests` has looked at, id by id."""
        self._check_process()
        request = self._tokenised(request, ids_checked=ids_checked)
        if isinstance(request, GenerateRequest):
            for pattern in request.sampling_params.stop_regex:
                compile_stop_regex(pattern)  # refused here, before it costs the loop time
        completions = request.sampling_params.n if isinstance(request, GenerateRequest) else 1
        self._front.router.register(request.request_id, sink, completions=completions)
        return m.Generate(request) if isinstance(request, GenerateRequest) else m.Score(request)

    def _check_process(self) -> None:
        """A forked child has no step loop: it would wait for ever."""
        if os.getpid() != self._pid:
            raise EngineDead("this engine belongs to another process; make one after the fork, or use a server")

    def _drop(self, request_id: str, sink: Sink) -> None:
        """Nobody reads it any more: abort it if it still runs."""
        if self._front.router.forget(request_id, sink):
            self._outbox.send([m.Abort(request_id)])

    def _tokenised(self, request: Any, *, ids_checked: bool) -> Any:
        """Text becomes ids and values are checked here, on the caller's thread and not on the loop's."""
        request = checked_fields(request)
        prompt = request.prompt
        ids = self.tokenizer.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else prompt
        looked_at = ids_checked and ids is prompt  # 64 prompts of 8,192 ids take 15 ms to look at
        changed: dict[str, Any] = {"prompt": ids if looked_at else checked_ids(ids, "prompt")}
        if isinstance(request, GenerateRequest):
            if not isinstance(request.grammar_after, tuple) or request.grammar_after:
                changed["grammar_after"] = checked_ids(request.grammar_after, "grammar_after")
        else:
            changed["continuations"] = checked_id_lists(request.continuations, "continuations")
        return msgspec.structs.replace(request, **changed)

    def _requests(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling],
        spec: GrammarSpec | None,
        *,
        stream: bool = False,
        truncate: bool = False,
    ) -> list[GenerateRequest]:
        each: Sequence[Sampling]
        if sampling is None or isinstance(sampling, SamplingParams | Mapping):
            each = [sampling] * len(prompts)
        else:
            each = sampling
        if len(each) != len(prompts):
            raise InvalidRequest(f"{len(prompts)} prompts but {len(each)} sampling parameters", param="sampling_params")
        requests: list[GenerateRequest] = []
        converted: dict[int, tuple[SamplingParams, GrammarSpec | None, bool]] = {}
        for prompt, given in zip(prompts, each, strict=True):
            if id(given) not in converted:
                rest, wants_cut = split_truncate(given)
                converted[id(given)] = (*sampling_params(rest), wants_cut)
            params, own, own_truncate = converted[id(given)]
            requests.append(
                GenerateRequest(
                    request_id=self.new_request_id(),
                    prompt=prompt if isinstance(prompt, str) else checked_ids(prompt, "prompt"),
                    sampling_params=params,
                    grammar=one_grammar(spec, own),
                    stream=stream,
                    truncate_prompt=truncate or own_truncate,
                )
            )
        return requests

    def _answers(self, requests: list[GenerateRequest], on_error: OnError) -> list[Any]:
        sink = ThreadSink()
        gathered = _Gathered(requests, on_error)
        try:
            commands: list[m.Command] = []
            for request in requests:
                try:
                    commands.append(self._registered(request, sink, ids_checked=True))
                except InvalidRequest as error:
                    gathered.take(_refused(request, error, on_error))
            self._outbox.send(commands)
            while not gathered.complete:
                gathered.take(sink.get())
        finally:  # an error, or Ctrl-C: the others are of no use to anybody
            for request in requests:
                self._drop(request.request_id, sink)
        return gathered.answers()

    async def _answers_async(self, requests: list[GenerateRequest], on_error: OnError) -> list[Any]:
        async def answer(request: GenerateRequest) -> Any:
            gathered = _Gathered([request], on_error)
            sink = self._front.mailboxes.sink()
            try:
                self._post(request, sink)
            except InvalidRequest as error:
                gathered.take(_refused(request, error, on_error))
            try:
                while not gathered.complete:
                    gathered.take(await sink.get())
            finally:
                self._drop(request.request_id, sink)
            return gathered.answers()[0]

        tasks = [asyncio.ensure_future(answer(request)) for request in requests]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    def _pieces(self, request: GenerateRequest) -> Iterator[RequestOutput]:
        sink = ThreadSink()
        self._submit(request, sink)
        try:
            left = request.sampling_params.n
            while left:
                output = _checked(sink.get())
                assert isinstance(output, RequestOutput)
                left -= output.finished
                yield output
        finally:
            self._drop(request.request_id, sink)

    def _score_request(self, prompt: Prompt, continuations: Sequence[Prompt]) -> ScoreRequest:
        return ScoreRequest(
            request_id=self.new_request_id(),
            prompt=prompt if isinstance(prompt, str) else checked_ids(prompt, "prompt"),
            continuations=tuple(
                checked_ids(self.tokenizer.encode(text) if isinstance(text, str) else text, "continuations")
                for text in continuations
            ),
        )


class _Gathered:
    """The answers of several requests, while their outputs come in any order."""

    def __init__(self, requests: Sequence[GenerateRequest], on_error: OnError) -> None:
        self._requests = requests
        self._on_error = on_error
        self._pieces: dict[str, dict[int, list[RequestOutput]]] = {r.request_id: {} for r in requests}
        self._failed: dict[str, RequestOutput] = {}
        self._unfinished = sum(r.sampling_params.n for r in requests)
        self._left = {r.request_id: r.sampling_params.n for r in requests}

    @property
    def complete(self) -> bool:
        return not self._unfinished

    def take(self, output: Item) -> None:
        if self._on_error == "raise":
            _checked(output)
        assert isinstance(output, RequestOutput)
        if output.error is not None or output.finish_reason is FinishReason.ABORT:
            self._failed.setdefault(output.request_id, output)
            self._unfinished -= self._left[output.request_id]
            self._left[output.request_id] = 0
            return
        self._pieces[output.request_id].setdefault(output.index, []).append(output)
        if output.finished and self._left[output.request_id]:
            self._left[output.request_id] -= 1
            self._unfinished -= 1

    def answers(self) -> list[RequestOutput | list[RequestOutput]]:
        return [self._answer(request) for request in self._requests]

    def _answer(self, request: GenerateRequest) -> RequestOutput | list[RequestOutput]:
        if request.request_id in self._failed:
            return self._failed[request.request_id]
        completions = [merge_outputs(pieces) for _, pieces in sorted(self._pieces[request.request_id].items())]
        return completions if request.sampling_params.n > 1 else completions[0]


def _refused(request: GenerateRequest, error: InvalidRequest, on_error: OnError) -> RequestOutput:
    if on_error == "raise":
        raise error
    return RequestOutput(request_id=request.request_id, finish_reason=FinishReason.ERROR, error=ErrorInfo.of(error))


def _checked(output: Item) -> Item:
    """Raises the error that ended a request."""
    if output.error is not None:
        raise output.error.to_exception()
    if isinstance(output, RequestOutput) and output.finish_reason is FinishReason.ABORT:
        raise RequestAborted(output.reason or "the request was aborted")
    return output


def _prompts(
    prompt: Prompt | Sequence[Prompt] | None, input_ids: Sequence[int] | Sequence[Sequence[int]] | None
) -> tuple[list[Prompt], bool]:
    if (prompt is None) == (input_ids is None):
        raise InvalidRequest("give either prompt or input_ids", param="prompt")
    given: Any = prompt if input_ids is None else input_ids
    empty_list = prompt is not None and isinstance(prompt, list | tuple) and not prompt
    if not empty_list and is_single(given):
        return [given], True
    return list(given), False


def _one(prompt: Prompt) -> list[Prompt]:
    if not is_single(prompt):
        raise InvalidRequest("a stream has one prompt, not a list of them; open one for each", param="prompt")
    return [prompt]


def _constraint(
    constraint: GrammarSpec | None,
    json_schema: Any,
    regex: str | None,
    choices: Sequence[str] | None,
    ebnf: str | None,
    whitespace: Whitespace,
    on_unsupported: OnUnsupported,
) -> GrammarSpec | None:
    made = grammar(
        json_schema=json_schema,
        regex=regex,
        choices=choices,
        ebnf=ebnf,
        whitespace=whitespace,
        on_unsupported=on_unsupported,
    )
    return one_grammar(constraint, made)


# SGLang's and vLLM's names for options of EngineConfig.
_OPTION_ALIASES = {
    "model_path": "model",
    "tokenizer_path": "tokenizer",
    "served_model_name": "served_name",
    "context_length": "max_model_len",
    "mem_fraction": "memory_fraction",
    "mem_fraction_static": "memory_fraction",
    "gpu_memory_utilization": "memory_fraction",
    "tp_size": "tensor_parallel",
    "tensor_parallel_size": "tensor_parallel",
    "random_seed": "seed",
    "max_running_requests": "max_rows",
    "max_num_seqs": "max_rows",
    "chunked_prefill_size": "max_step_tokens",
    "max_num_batched_tokens": "max_step_tokens",
}
# The same for switches that say the opposite.
_OPTION_OPPOSITES = {
    "disable_radix_cache": "prefix_cache",
    "disable_overlap_schedule": "overlap",
    "disable_cuda_graph": "cuda_graphs",
    "enforce_eager": "cuda_graphs",
}


def _config(model: str | None, config: EngineConfig | None, options: Mapping[str, Any]) -> EngineConfig:
    known = {field.name for field in dataclasses.fields(EngineConfig)}
    values: dict[str, Any] = {} if model is None else {"model": model}
    for name, value in options.items():
        if name in _OPTION_OPPOSITES:
            field, value = _OPTION_OPPOSITES[name], not value
        else:
            field = _OPTION_ALIASES.get(name, name)
        if field not in known:
            meant = did_you_mean(name, known | set(_OPTION_ALIASES) | set(_OPTION_OPPOSITES))
            raise InvalidRequest(
                f"unknown option {name!r}; {meant and meant + ' '}known: {', '.join(sorted(known))}", param=name
            )
        if field in values:
            raise InvalidRequest(f"{field} was given twice", param=name)
        values[field] = value
    return dataclasses.replace(config or EngineConfig(), **values)
