"""The engine core: takes requests, runs steps, gives outputs. One thread calls everything here."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

from sglite.grammar.matcher import BatchFiller, CompiledGrammar, Matcher
from sglite.protocol import GenerateRequest, GrammarSpec, RequestOutput, ScoreOutput, ScoreRequest
from sglite.runtime.batch import Executor
from sglite.runtime.config import EngineConfig, SamplingDefaults
from sglite.text.types import TextTokenizer


class GrammarService(Protocol):
    """What the engine asks of the grammar side. `sglite.grammar` provides it; tests use a fake."""

    filler: BatchFiller

    def compile(self, spec: GrammarSpec) -> Future[CompiledGrammar]:
        """Never blocks. The future may be done already (cached). It fails with an error of errors.py; any other
        exception ends the one request too."""
        ...

    def heal(self, token_id: int, inner: Matcher | None) -> Matcher | None:
        """A matcher whose next tokens must continue the bytes of `token_id` and then follow `inner` (None: free).
        None where no longer token begins with those bytes or the token is special: nothing to heal."""
        ...


class EngineCore:
    """Answers requests with one executor.

    `grammars` None: constrained requests and `heal` are refused. `max_model_len`: prompt and output together, in
    tokens. `defaults`: the model's generation_config. The caller's loop is

        while open:
            if not core.has_work: wait until the waker was called
            for output in core.step(): route it by output.request_id

    All methods are called from one thread; only the waker (set_waker) is called from others, when something that
    the engine waits for (a compiled grammar) is there.
    """

    def __init__(
        self,
        executor: Executor,
        tokenizer: TextTokenizer,
        grammars: GrammarService | None,
        config: EngineConfig,
        *,
        max_model_len: int,
        defaults: SamplingDefaults = SamplingDefaults(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None: ...

    def add(self, request: GenerateRequest | ScoreRequest) -> None:
        """Take a request in. Raises InvalidRequest, PromptTooLong, OutOfPages or Overloaded without changing
        anything; errors found later come as a RequestOutput / ScoreOutput with `error`."""
        ...

    def abort(self, request_id: str, reason: str = "aborted") -> None:
        """End all completions of a request; each gives a last output with finish_reason "abort". A no-op for
        unknown and finished ids."""
        ...

    def release(self, request_id: str) -> None:
        """Give up a row that `hold` kept. A no-op for unknown ids."""
        ...

    def warm_prefix(
        self, request_id: str, token_ids: Sequence[int], *, namespace: str = "", lease_s: float = 60.0
    ) -> None:
        """Compute and lease a prefix. Answered by one finished RequestOutput; usage.prompt_tokens were kept."""
        ...

    def flush_cache(self) -> bool:
        """Drop every cached prefix that no running request uses. True when nothing is left in the cache."""
        ...

    def set_waker(self, waker: Callable[[], None]) -> None:
        """`waker()` is called, from any thread, when has_work may have become true without a call from here."""
        ...

    @property
    def has_work(self) -> bool:
        """step() has something to do. False while every request only waits for a grammar."""
        ...

    def step(self) -> list[RequestOutput | ScoreOutput]:
        """One turn of the loop. Returns at once when there is nothing to do. Never raises for a request's sake."""
        ...

    def close(self) -> None:
        """Abort everything and close the executor."""
        ...
