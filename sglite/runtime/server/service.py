"""What every route works with: the engine, the limits, and the one way in which a request is carried out."""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any, Protocol

import msgspec

from sglite.errors import EngineDead, InvalidRequest, RequestAborted, SgliteError
from sglite.protocol import (
    Coverage,
    GenerateRequest,
    GrammarSpec,
    ModelInfo,
    RequestOutput,
    SamplingParams,
    ScoreOutput,
    ScoreRequest,
)
from sglite.runtime.server.admission import Admission
from sglite.runtime.server.auth import Tenant
from sglite.runtime.server.chat.tools import tool_format
from sglite.runtime.server.chat.turn import TurnPreparer
from sglite.runtime.server.config import ServerConfig
from sglite.runtime.server.errors import DeadlineExceeded
from sglite.runtime.server.metrics import ServerMetrics
from sglite.runtime.server.middleware import RequestRecord
from sglite.runtime.server.programs import Programs
from sglite.runtime.server.sessions import ProgramSessions
from sglite.runtime.server.tokenise import THREAD_CHARS, PromptThreads, encode_prompt
from sglite.text.types import TextTokenizer

MAX_COMPILED = 4096
_PROBE = SamplingParams(max_tokens=1, temperature=0.0)


class ServedEngine(Protocol):
    """What a server needs of what it serves: a Client (see `sglite.lang.client`) with a tokenizer that also tells how
    it is. `sglite.Engine` is one."""

    model_info: ModelInfo
    facts: dict[str, Any]  # plain values about it; "tokenizer_folder"

    @property
    def tokenizer(self) -> TextTokenizer: ...

    @property
    def alive(self) -> bool: ...

    def stream_request(self, request: GenerateRequest) -> AsyncGenerator[RequestOutput, None]: ...

    async def score_request(self, request: ScoreRequest) -> ScoreOutput: ...

    async def compile_grammar(self, spec: GrammarSpec) -> Coverage: ...

    async def abort(self, request_id: str) -> None: ...

    async def release(self, request_id: str) -> None: ...

    async def end_program(self, program_id: str) -> None: ...

    async def flush_cache(self) -> bool: ...

    async def stats_async(self) -> dict[str, Any]: ...


class Call:
    """Who asked, under which id, until when."""

    def __init__(self, tenant: Tenant, record: RequestRecord, *, timeout_s: float) -> None:
        self.tenant = tenant
        self.record = record
        self.deadline = record.started + timeout_s  # time.monotonic() seconds
        self._children = 0

    def request_id(self) -> str:
        """The call's own id for its first engine request, derived ones for the others."""
        self._children += 1
        suffix = "" if self._children == 1 else f":{self._children}"
        return self.tenant.owned(self.record.request_id + suffix)


class Service:
    def __init__(self, engine: ServedEngine, config: ServerConfig) -> None:
        self.engine = engine
        self.config = config
        self.tokenizer = engine.tokenizer
        self.admission = Admission(
            max_running=config.max_running,
            max_waiting=config.max_waiting,
            max_waiting_tokens=config.max_waiting_tokens,
        )
        self.metrics = ServerMetrics()
        self.programs = Programs()
        self.prompt_threads = PromptThreads()
        self._running_ids: dict[str, list[str]] = {}  # the engine's ids by what clients call them
        self._numbers = itertools.count()
        # Hashes of constraints that the engine has accepted: asking it again would take a step of waiting.
        self._compiled: dict[int, None] = {}
        self.program_sessions = ProgramSessions()
        self.more_paths: frozenset[str] = frozenset()  # of routes that lie above the runtime
        self.kept: dict[str, Any] = {}  # what routes make once a server
        self.started = time.time()  # of the server, Unix seconds
        self.turns = TurnPreparer(
            self.tokenizer,
            tool_format(config.tool_format, self.tokenizer),
            strictness=config.tool_strictness,
            reasoning=config.reasoning,
            max_model_len=engine.model_info.max_model_len,
        )

    @property
    def model_name(self) -> str:
        return self.config.served_model_name or self.engine.model_info.name

    def check_model(self, asked: str | None) -> None:
        if self.config.check_model_name and asked not in (None, self.model_name):
            error = InvalidRequest(f"the model {asked!r} is not served here; {self.model_name!r} is", param="model")
            error.status, error.code = 404, "model_not_found"
            raise error

    def call(self, tenant: Tenant, record: RequestRecord, *, timeout_s: float | None = None) -> Call:
        longest = self.config.request_timeout_s
        return Call(tenant, record, timeout_s=longest if timeout_s is None else min(timeout_s, longest))

    async def outputs(
        self, request: GenerateRequest, call: Call, *, rid: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Carry one request out: wait for a place, run, observe. Raises the error that refused or ended it; closing the
        generator aborts it. `rid`: the client's own id for it, under which it can be aborted; in use by one request at
        a time. Without it the id of the HTTP request is the name, which may be sent twice."""
        name = call.request_id() if rid is None else call.tenant.owned(rid)
        request_id = f"{name}#{next(self._numbers)}" if rid is None else name
        request = self._checked(
            msgspec.structs.replace(
                request, request_id=request_id, namespace=call.tenant.namespace, deadline=call.deadline
            )
        )
        place = self.admission.place(
            call.tenant.name, tokens=len(request.prompt), deadline=call.deadline, name=request_id
        )
        self._running_ids.setdefault(name, []).append(request_id)
        try:
            async with place as waited:
                self.metrics.queue_time.observe(waited)
                call.record.queue_s = waited
                await self._compile(request.grammar)
                async with aclosing(self._observed(request, call)) as observed:
                    async for output in observed:
                        yield output
        except SgliteError as error:
            self.metrics.requests.labels(error.code).inc()
            if isinstance(error, RequestAborted) and time.monotonic() >= call.deadline:
                raise DeadlineExceeded("the request took longer than it may") from error
            raise
        finally:
            self._running_ids[name].remove(request_id)
            if not self._running_ids[name]:
                del self._running_ids[name]

    async def abort(self, tenant: Tenant, name: str) -> None:
        """End the tenant's requests of that name, waiting or running; a no-op where there are none."""
        owned = tenant.owned(name)
        for request_id in list(self._running_ids.get(owned, (owned,))):
            self.admission.abort(request_id)
            await self.engine.abort(request_id)

    async def score(self, request: ScoreRequest, call: Call, *, rid: str | None = None) -> ScoreOutput:
        request = msgspec.structs.replace(
            request,
            request_id=call.request_id() if rid is None else call.tenant.owned(rid),
            namespace=call.tenant.namespace,
        )
        for ids in (request.prompt, *request.continuations):
            self._check_ids("input_ids", ids)
        place = self.admission.place(call.tenant.name, tokens=len(request.prompt), deadline=call.deadline)
        async with place as waited:
            call.record.queue_s = waited
            output = await self.engine.score_request(request)
        call.record.usage = output.usage
        return output

    async def healthy(self, *, timeout_s: float = 10.0) -> bool:
        """A token can be generated now."""
        if not self.engine.alive:
            return False
        probe = GenerateRequest(
            request_id=f"health:{uuid.uuid4().hex}",
            prompt=(self._probe_token(),),
            sampling_params=_PROBE,
            namespace="health",
            priority=-1,
            stream=False,
        )
        try:
            async with asyncio.timeout(timeout_s):
                async with aclosing(self.engine.stream_request(probe)) as outputs:
                    async for _ in outputs:
                        pass
        except (TimeoutError, SgliteError):
            return False
        return True

    async def stats(self) -> dict[str, Any]:
        """The engine's counters; {} while it is down."""
        try:
            async with asyncio.timeout(2.0):
                return await self.engine.stats_async()
        except (TimeoutError, EngineDead):
            return {}

    async def encoded(self, text: str, *, add_special_tokens: bool, any_length: bool = False) -> tuple[int, ...]:
        """The ids of a prompt. Raises PromptTooLong early for one that is much too long, unless `any_length`."""
        longest = self.engine.model_info.max_model_len
        if any_length or longest <= 0:
            longest = len(text)
        work = partial(encode_prompt, self.tokenizer, text, longest=longest, add_special_tokens=add_special_tokens)
        return tuple(work() if len(text) < THREAD_CHARS else await self.prompt_threads.run(work))

    def _probe_token(self) -> int:
        return self.tokenizer.encode("a")[0]

    def _checked(self, request: GenerateRequest) -> GenerateRequest:
        self._check_ids("prompt", request.prompt)
        self._check_ids("stop_token_ids", request.sampling_params.stop_token_ids)
        self._check_ids("logit_bias", tuple(request.sampling_params.logit_bias or ()))
        return request

    def _check_ids(self, name: str, ids: str | tuple[int, ...]) -> None:
        limit = self.engine.model_info.vocab_size
        assert not isinstance(ids, str)
        if ids and not (min(ids) >= 0 and max(ids) < limit):
            raise InvalidRequest(f"{name} holds a token id outside 0..{limit - 1}", param=name)

    async def _compile(self, grammar: GrammarSpec | None) -> None:
        """Ahead of the request, so that a refusal costs no place in the engine and its time is seen."""
        if grammar is None or hash(grammar) in self._compiled:
            return
        begun = time.monotonic()
        await self.engine.compile_grammar(grammar)
        self.metrics.grammar_time.observe(time.monotonic() - begun)
        self._compiled[hash(grammar)] = None
        if len(self._compiled) > MAX_COMPILED:
            del self._compiled[next(iter(self._compiled))]

    async def _observed(self, request: GenerateRequest, call: Call) -> AsyncGenerator[RequestOutput, None]:
        metrics, record = self.metrics, call.record
        last: dict[int, float] = {}
        async with aclosing(self.engine.stream_request(request)) as outputs:
            async for output in outputs:
                now = time.monotonic()
                if output.token_ids:
                    if record.first_token_s is None:
                        record.first_token_s = now - record.started
                        metrics.first_token.observe(record.first_token_s)
                    before = last.get(output.index)
                    if before is not None:
                        metrics.between_tokens.observe((now - before) / len(output.token_ids))
                    last[output.index] = now
                if output.finished:
                    metrics.finished(output)
                    metrics.total_time.observe(now - record.started)
                    record.usage = output.usage if record.usage is None else record.usage + output.usage
                    record.finish_reasons.append(str(output.finish_reason))
                yield output
