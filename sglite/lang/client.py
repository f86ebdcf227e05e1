"""What a program needs of whatever answers it: sglite.Engine, the remote backends, the test double.

A client with `tokenizer` None takes and gives text only (an OpenAI-compatible API); the interpreter then sends text.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Protocol, TypeGuard

from sglite.protocol import (
    Coverage,
    GenerateRequest,
    GrammarSpec,
    GraphAnswer,
    GraphRun,
    ModelInfo,
    RequestOutput,
    ScoreOutput,
    ScoreRequest,
)
from sglite.text.types import TextTokenizer


class Client(Protocol):
    tokenizer: TextTokenizer | None
    model_info: ModelInfo

    def stream_request(self, request: GenerateRequest) -> AsyncIterator[RequestOutput]:
        """Outputs of all `n` completions as they come (one final one each with stream=False). Raises the error
        of the tree in errors.py that refused or ended the request. Closing the iterator aborts the request."""
        ...

    async def score_request(self, request: ScoreRequest) -> ScoreOutput: ...

    async def compile_grammar(self, spec: GrammarSpec) -> Coverage:
        """Compile now, so that the first use finds it ready. Raises GrammarError / GrammarTimeout."""
        ...

    async def warm_prefix(self, token_ids: tuple[int, ...], *, namespace: str = "", lease_s: float = 60.0) -> int:
        """Prefill and keep a prefix for at least lease_s seconds (as far as memory allows). Returns cached tokens."""
        ...

    async def abort(self, request_id: str) -> None:
        """Idempotent; a no-op for unknown or finished requests."""
        ...

    async def release(self, request_id: str) -> None:
        """Give up a row kept by `hold`. Idempotent."""
        ...

    async def end_program(self, program_id: str) -> None:
        """The program is over: nothing is read again that was kept for it. Idempotent."""
        ...

    async def flush_cache(self) -> bool:
        """Drop all cached prefixes that no running request uses."""
        ...


class ChatClient(Client, Protocol):
    """A client that takes a chat's messages instead of a prompt."""

    def stream_chat(
        self, messages: Sequence[Mapping[str, Any]], request: GenerateRequest
    ) -> AsyncIterator[RequestOutput]:
        """As `stream_request`; the request's prompt is not looked at."""
        ...


def takes_chats(client: Client) -> TypeGuard[ChatClient]:
    return callable(getattr(client, "stream_chat", None))


class GraphClient(Client, Protocol):
    """A client of something that runs whole graphs beside its engine."""

    def run_graph(self, run: GraphRun) -> AsyncIterator[GraphAnswer]:
        """The answers of all calls as they come, in any order. Closing the iterator ends the run."""
        ...


def runs_graphs(client: Client) -> TypeGuard[GraphClient]:
    return callable(getattr(client, "run_graph", None)) and client.tokenizer is not None


def shares_prompts(client: Client) -> bool:
    """Whether prompts that begin alike are computed once though they come at the same time. A client of a server that
    does not say so has `shares_prompts = False`."""
    return bool(getattr(client, "shares_prompts", True))


def holds_rows(client: Client) -> bool:
    """Whether `hold` and `continue_from` may be asked of it. A client over HTTP says no with `holds_rows = False`."""
    return client.tokenizer is not None and bool(getattr(client, "holds_rows", True))


def courtesy(client: Client) -> Callable[[], object]:
    """What to call before work that can wait for a moment: `after_you` of a client whose engine shares this process."""
    found = getattr(client, "after_you", None)
    return found if callable(found) else _nothing


def _nothing() -> None:
    """Nobody is in the way."""


def takes_followers(client: Client) -> bool:
    """Whether `continue_from` may name a request that has not ended. A client of an engine in reach says so with
    `takes_followers = True`."""
    return holds_rows(client) and bool(getattr(client, "takes_followers", False))
