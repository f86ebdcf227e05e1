"""Graphs of programs, run beside the engine of a server: POST /programs/run.

A remote program whose graph is static (sglite.lang.ahead) comes whole. It is carried out here by the same interpreter
that carries programs out elsewhere, in program order, on the server's event loop; the answers of all its calls go back
in one stream as they come.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from sglite.errors import InvalidRequest
from sglite.lang.ahead import can_be_sent
from sglite.lang.branch import Branch
from sglite.lang.bridge import Posts, until_done
from sglite.lang.choices import CHOICES_METHODS
from sglite.lang.interpreter import carry_out
from sglite.lang.items import Concatenate, Said, Slot
from sglite.lang.nodes import Gen, GenParams, Node, RoleBegin, RoleEnd, ScopeBegin, ScopeEnd, Select, Text
from sglite.lang.outlook import outlooks
from sglite.lang.roles import Roles, roles_of
from sglite.lang.session import Session
from sglite.lang.transcript import Segments
from sglite.protocol import (
    Coverage,
    GenerateRequest,
    GrammarSpec,
    GraphAnswer,
    GraphNode,
    GraphRun,
    RequestOutput,
    SamplingParams,
    ScoreOutput,
    ScoreRequest,
    ids_digest,
    without_prompt,
)
from sglite.runtime.server.deps import CallDep, ServiceDep
from sglite.runtime.server.routes.programs import check
from sglite.runtime.server.service import Call, Service
from sglite.runtime.server.sse import DONE, EventStream, event, guarded, primed, while_connected
from sglite.text.types import TextTokenizer

MAX_NODES = 10_000
MAX_BRANCHES = 1_000

router = APIRouter(include_in_schema=False)
_decoder = msgspec.json.Decoder(GraphRun)


@router.post("/programs/run")
async def run_graph(request: Request, service: ServiceDep, call: CallDep) -> Response:
    """Run a graph; a stream of GraphAnswers. A client that leaves ends the run."""
    run = _decoded(await request.body())
    events = await while_connected(request, primed(_events(service, run, call)))
    return EventStream(guarded(events, request.url.path))


def _decoded(body: bytes) -> GraphRun:
    try:
        run = _decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"this is no graph of a program: {error}") from error
    graph = run.graph
    if len(graph.nodes) > MAX_NODES:
        raise InvalidRequest(f"the graph has {len(graph.nodes)} operations; at most {MAX_NODES} are run", param="graph")
    if not can_be_sent(graph):
        raise InvalidRequest("only a graph that holds the whole program can be run", param="graph")
    if any(node.source is not None and not 0 <= node.source < i for i, node in enumerate(graph.nodes)):
        raise InvalidRequest("a variable is read before it is set", param="graph")
    wanted = [*graph.arguments, *(node.name or "" for node in graph.nodes if node.op == "argument")]
    missing = [name for name in wanted if name not in run.arguments]
    if missing:
        raise InvalidRequest(f"the argument {missing[0]!r} has no text", param="arguments")
    return run


async def _events(service: Service, run: GraphRun, call: Call) -> AsyncGenerator[bytes, None]:
    answers: asyncio.Queue[GraphAnswer | None] = asyncio.Queue()
    client = _ServiceClient(service, call, answers)
    segments, roles = service_tools(service)
    session = Session(
        name=run.graph.name,
        client=client,
        loop=asyncio.get_running_loop(),
        posts=Posts(asyncio.get_running_loop()),
        defaults=GenParams(),
        roles=roles,
        segments=segments,
        stream=run.stream,
        plan=outlooks(run.graph),
    )
    running = asyncio.ensure_future(_carried_out(session, run))
    running.add_done_callback(lambda _: answers.put_nowait(None))
    try:
        while (answer := await answers.get()) is not None:
            yield event(answer)
        await running
        yield DONE
    finally:
        running.cancel()
        session.cancel("the client left")
        await client.end_program(session.program_id)


def service_tools(service: Service) -> tuple[Segments, Roles]:
    """Made once a server."""
    if "program tools" not in service.kept:
        service.kept["program tools"] = Segments(service.tokenizer), roles_of(service.tokenizer)
    return service.kept["program tools"]


async def _carried_out(session: Session, run: GraphRun) -> None:
    """In program order, waiting for a value where the program appends it. Raises what ended a state."""
    graph = run.graph
    branches = {0: Branch(session, carry_out)}
    slots: dict[int, Slot | None] = {}
    for number, node in enumerate(graph.nodes):
        branch = branches.get(node.branch)
        if branch is None:
            raise InvalidRequest(f"operation {number} belongs to no state", param="graph")
        match node.op:
            case "fork":
                if len(branches) + len(node.children) > MAX_BRANCHES:
                    raise InvalidRequest(f"at most {MAX_BRANCHES} states in one run", param="graph")
                children = branch.fork(max(1, len(node.children)))
                branches |= dict(zip(node.children, children, strict=False))
            case "join":
                pass  # who reads what the forks have said waits for it
            case "concatenate":
                children = [branches[child] for child in node.children if child in branches]
                said = [await _settled(child) for child in children]
                branch.append_at(Concatenate(tuple(said)), node.step)
            case "variable":
                branch.append_at(Text(await _value(slots, node)), node.step)
            case _:
                slots[number] = branch.append_at(_node(node, run.arguments), node.step)
    session.returned.set_result(None)
    for branch in branches.values():
        await _settled(branch)


async def _settled(branch: Branch) -> Said:
    future = branch.snapshot()
    await until_done(future)
    return future.result()


async def _value(slots: Mapping[int, Slot | None], node: GraphNode) -> str:
    slot = None if node.source is None else slots.get(node.source)
    if slot is None:
        raise InvalidRequest(f"nothing sets the variable {node.name!r} before it is read", param="graph")
    await until_done(slot.future)
    value = slot.future.result().raw
    if node.entry is not None and isinstance(value, list) and 0 <= node.entry < len(value):
        value = value[node.entry]
    if not isinstance(value, str):
        raise InvalidRequest(f"the variable {node.name!r} is no text", param="graph")
    return value


def _node(node: GraphNode, arguments: Mapping[str, str]) -> Node:
    name = node.name
    match node.op:
        case "text":
            return Text(node.text)
        case "argument":
            return Text(arguments[name or ""])
        case "gen":
            return Gen(name=name, params=_params(node.params or SamplingParams()), grammar=node.grammar)
        case "select" if node.choices:
            return Select(name=name, choices=node.choices, method=CHOICES_METHODS[node.method])
        case "role_begin" if name:
            return RoleBegin(name)
        case "role_end" if name:
            return RoleEnd(name)
        case "scope_begin" if name:
            return ScopeBegin(name)
        case "scope_end" if name:
            return ScopeEnd(name)
        case _:
            raise InvalidRequest(f"the operation {node.op!r} cannot be run here", param="graph")


def _params(given: SamplingParams) -> GenParams:
    """What `GenParams.sampling_params` made these of."""
    wants_logprobs = given.logprobs is not None or given.prompt_logprobs is not None
    return GenParams(
        max_tokens=given.max_tokens,
        min_tokens=given.min_tokens,
        n=given.n,
        stop=given.stop,
        stop_token_ids=given.stop_token_ids,
        stop_regex=given.stop_regex,
        temperature=given.temperature,
        top_p=given.top_p,
        top_k=given.top_k,
        min_p=given.min_p,
        frequency_penalty=given.frequency_penalty,
        presence_penalty=given.presence_penalty,
        repetition_penalty=given.repetition_penalty,
        logit_bias=None if given.logit_bias is None else tuple(sorted(given.logit_bias.items())),
        ignore_eos=given.ignore_eos,
        seed=given.seed,
        return_logprob=wants_logprobs or None,
        logprob_start_len=0 if given.prompt_logprobs is not None else None,
        top_logprobs_num=given.logprobs,
    )


class _ServiceClient:
    """Satisfies `sglite.lang.client.Client`: the served engine as one caller may use it. Every answer goes to the queue
    too."""

    def __init__(self, service: Service, call: Call, answers: asyncio.Queue[GraphAnswer | None]) -> None:
        self.tokenizer: TextTokenizer | None = service.tokenizer
        self.model_info = service.engine.model_info
        self._service = service
        self._call = call
        self._answers = answers
        self._ids: dict[str, tuple[int, ...]] = {}  # what rows hold, by request
        self._rows: set[str] = set()  # requests that may hold one
        self._calls = 0  # under way
        self._idle = asyncio.Event()

    @contextlib.contextmanager
    def _under_way(self, request: GenerateRequest | ScoreRequest) -> Generator[None]:
        if request.hold:
            self._rows.add(request.request_id)
        self._calls += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._calls -= 1
            if not self._calls:
                self._idle.set()

    async def stream_request(self, request: GenerateRequest) -> AsyncGenerator[RequestOutput]:
        check(request, self._service)
        with self._under_way(request):
            async with aclosing(self._generated(request)) as outputs:
                async for output in outputs:
                    yield output

    async def _generated(self, request: GenerateRequest) -> AsyncGenerator[RequestOutput]:
        whole, place = self._whole(request), _place(request.request_id)
        ids: list[int] = []
        first = True
        async with aclosing(self._service.outputs(self._owned(request), self._call, rid=request.request_id)) as outputs:
            async for output in outputs:
                if first:
                    ids = list(output.prompt_token_ids or whole)
                if output.index == 0:
                    ids += output.token_ids
                if output.finished:
                    self._ids[request.request_id] = tuple(ids)
                sent = without_prompt(output, whole)
                digest = ids_digest(whole) if first else ""
                self._answers.put_nowait(GraphAnswer(call=place, prompt=digest, generated=sent))
                first = False
                yield output

    async def score_request(self, request: ScoreRequest) -> ScoreOutput:
        whole = self._whole(request)
        with self._under_way(request):
            output = await self._service.score(self._owned(request), self._call, rid=request.request_id)
        self._ids[request.request_id] = whole
        place = _place(request.request_id)
        self._answers.put_nowait(GraphAnswer(call=place, prompt=ids_digest(whole), scored=output))
        return output

    async def compile_grammar(self, spec: GrammarSpec) -> Coverage:
        return await self._service.engine.compile_grammar(spec)

    async def warm_prefix(self, token_ids: tuple[int, ...], *, namespace: str = "", lease_s: float = 60.0) -> int:
        return 0

    async def abort(self, request_id: str) -> None:
        await self._service.engine.abort(self._call.tenant.owned(request_id))

    async def release(self, request_id: str) -> None:
        await self._service.engine.release(self._call.tenant.owned(request_id))

    async def end_program(self, program_id: str) -> None:
        if self._calls:  # cancelled ones tell the engine so first, or their rows would be released before they are held
            await self._idle.wait()
        for request_id in self._rows:
            await self.release(request_id)
        await self._service.engine.end_program(self._call.tenant.owned(program_id))

    async def flush_cache(self) -> bool:
        return False

    def _whole(self, request: GenerateRequest | ScoreRequest) -> tuple[int, ...]:
        assert isinstance(request.prompt, tuple)
        if request.continue_from is None:
            return request.prompt
        return (*self._ids[request.continue_from][: request.keep], *request.prompt)

    def _owned(self, request: Any) -> Any:
        """With the ids of its tenant."""
        owned = self._call.tenant.owned
        program = request.program
        ref = msgspec.structs.replace(
            program,
            program_id=owned(program.program_id),
            parent=None if program.parent is None else owned(program.parent),
        )
        row = None if request.continue_from is None else owned(request.continue_from)
        return msgspec.structs.replace(request, program=ref, continue_from=row)


def _place(request_id: str) -> str:
    """Also of one that was sent whole because its row was gone."""
    return request_id.rpartition("-")[2].rstrip("w")
