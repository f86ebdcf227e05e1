"""A program with everything ready that can be known before it runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglite.lang.bridge import program_loop
from sglite.lang.client import Client
from sglite.lang.config import client_or_default
from sglite.lang.outlook import outlooks
from sglite.lang.prefix import MIN_TOKENS
from sglite.lang.program import Program
from sglite.lang.state import ProgramState
from sglite.lang.trace import trace
from sglite.lang.transcript import TokenTranscript
from sglite.protocol import Coverage, GrammarSpec, ProgramGraph

LEASE_S = 600.0


@dataclass(frozen=True, slots=True)
class CompiledProgram:
    """`coverage`: of each constrained gen, by its variable (or `%number` in the graph). `prefix_tokens`: of the static
    prefix, which the backend keeps ready (0 where it is too short to be worth a step).

    Runs as the program does, on the backend that it was compiled for, with the same text. What is known of the way
    ahead goes with each call: a generation that another one follows keeps its row, and the next one sends only what
    came after it; tokens that are read again are leased. An sglite server gets a static program's graph whole and runs
    it beside its engine (ahead.py). Where a run leaves the graph it goes on step by step.
    """

    program: Program
    client: Client
    graph: ProgramGraph
    coverage: Mapping[str, Coverage]
    prefix_tokens: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.program(*args, backend=self.client, **kwargs)

    def run(self, *args: Any, stream: bool = False, **kwargs: Any) -> ProgramState:
        return self.program.run(*args, backend=self.client, stream=stream, **kwargs)

    async def run_async(self, *args: Any, stream: bool = False, **kwargs: Any) -> ProgramState:
        return await self.program.run_async(*args, backend=self.client, stream=stream, **kwargs)

    def stream(self, *args: Any, **kwargs: Any) -> ProgramState:
        return self.program.stream(*args, backend=self.client, **kwargs)

    def run_batch(
        self, batch_kwargs: Iterable[Mapping[str, Any] | Sequence[Any]], **options: Any
    ) -> list[ProgramState] | Iterator[ProgramState]:
        return self.program.run_batch(batch_kwargs, backend=self.client, **options)

    def __str__(self) -> str:
        return str(self.graph)


def compile_program(program: Program, arguments: dict[str, Any], *, backend: Any) -> CompiledProgram:
    """Raises GrammarError, GrammarTimeout or InvalidRequest."""
    client = client_or_default(backend)
    began = time.monotonic()
    graph = trace(program, arguments)
    if graph.complete:  # all that its function does was done
        program.pace.kept(time.monotonic() - began)
        program.pace.ended()
    coverage = program_loop().run(_compile_grammars(client, graph))
    prefix_tokens = _warm(client, program, graph)
    return CompiledProgram(program.planned(outlooks(graph), graph), client, graph, coverage, prefix_tokens)


def warm_static_prefix(program: Program, *, backend: Any) -> int:
    client = client_or_default(backend)
    return _warm(client, program, trace(program, {}))


async def _compile_grammars(client: Client, graph: ProgramGraph) -> dict[str, Coverage]:
    wanted: dict[GrammarSpec, list[str]] = {}
    for number, node in enumerate(graph.nodes):
        if node.grammar is not None:
            wanted.setdefault(node.grammar, []).append(node.name or f"%{number}")
    found = await asyncio.gather(*(client.compile_grammar(spec) for spec in wanted))
    return {name: coverage for names, coverage in zip(wanted.values(), found, strict=True) for name in names}


def _warm(client: Client, program: Program, graph: ProgramGraph) -> int:
    prefix = static_prefix(client, program, graph)
    if len(prefix) < MIN_TOKENS:  # it would take a step of its own, and the first run computes it on the way
        return 0
    return program_loop().run(client.warm_prefix(prefix, lease_s=LEASE_S))


def static_prefix(client: Client, program: Program, graph: ProgramGraph) -> tuple[int, ...]:
    """The token ids that every run begins with; () where there are none, or the client takes text."""
    if client.tokenizer is None:
        return ()
    segments, roles = program.tools(client.tokenizer)
    transcript = TokenTranscript(segments)
    seen: list[str] = []
    for node in graph.nodes:
        match node.op:
            case "text":
                transcript.append(node.text)
            case "role_begin" if node.name is not None:
                seen.append(node.name)
                transcript.append(roles.around(tuple(seen))[0], template=True)
            case "role_end":
                transcript.append(roles.around(tuple(seen))[1], template=True)
            case "scope_begin" | "scope_end":
                pass
            case _:
                break
    return transcript.settled()
