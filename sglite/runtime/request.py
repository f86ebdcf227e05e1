"""The record of one prompt being completed, and of the API request that it belongs to.

Job      what a client asked for: n completions, the rows of one scoring, or a prefix to warm
Request  one row's worth of it, written by the scheduler and by the outputs, nobody else
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np

from sglite.grammar.matcher import CompiledGrammar, Matcher
from sglite.protocol import FinishReason, GenerateRequest, ProgramRef, ScoreRequest
from sglite.runtime.batch import IntArray, RowSampling
from sglite.runtime.cache.access_log import Entry
from sglite.runtime.cache.manager import Prefix
from sglite.runtime.cache.radix_tree import Namespace
from sglite.runtime.completion import Completion
from sglite.runtime.scoring import ScoreTrie, Targets


class RequestStatus(enum.IntEnum):
    """Ordered: everything from STOPPED on is over."""

    WAITING_GRAMMAR = enum.auto()
    WAITING = enum.auto()
    RUNNING = enum.auto()
    STOPPED = enum.auto()
    LENGTH = enum.auto()
    GRAMMAR_END = enum.auto()
    SCHEMA_VIOLATION = enum.auto()
    ABORTED = enum.auto()
    FAILED = enum.auto()


FINISH_REASONS: dict[RequestStatus, FinishReason] = {
    RequestStatus.STOPPED: FinishReason.STOP,
    RequestStatus.LENGTH: FinishReason.LENGTH,
    RequestStatus.GRAMMAR_END: FinishReason.GRAMMAR,
    RequestStatus.SCHEMA_VIOLATION: FinishReason.SCHEMA_VIOLATION,
    RequestStatus.ABORTED: FinishReason.ABORT,
    RequestStatus.FAILED: FinishReason.ERROR,
}


@dataclass(frozen=True, slots=True)
class Moment:
    """`at`: time.monotonic() seconds; what the engine had done by then."""

    at: float
    steps: int
    step_s: float


@dataclass(slots=True, eq=False)
class Job:
    """An API request and the requests that carry it out."""

    request_id: str
    source: GenerateRequest | ScoreRequest | None  # None: a prefix to warm
    arrival: float
    priority: int = 0
    program: ProgramRef | None = None
    requests: list[Request] = field(default_factory=list)
    num_open: int = 0
    trie: ScoreTrie | None = None  # of a scoring
    lease_until: float = 0.0  # of a prefix to warm, time.monotonic() seconds
    num_prompt: int = 0  # of a scoring or warming: prompt tokens
    cached_tokens: int = 0  # of a scoring or warming: found in the cache at its first row's admission

    @property
    def since(self) -> float:
        """When what it belongs to began, time.monotonic() seconds: a call without a program is one of its own."""
        return self.arrival if self.program is None else self.program.arrival or self.arrival


@dataclass(slots=True, eq=False)
class Request:
    job: Job
    index: int  # which completion, or which row of a scoring
    ids: IntArray  # a buffer; the first num_tokens are valid
    num_tokens: int  # prompt and output
    num_prompt: int
    limit: int  # num_tokens at which it ends by length
    end: int  # positions whose KV it ever needs: limit - 1 where it samples
    samples: bool  # False: only computes (scoring, warming, prompt log-probabilities)
    sampling: RowSampling
    namespace: Namespace
    completion: Completion | None = None  # None for a row of a scoring and for a prefix to warm
    targets: Targets | None = None
    status: RequestStatus = RequestStatus.WAITING
    grammar: CompiledGrammar | None = None
    matcher: Matcher | None = None
    row: int = -1  # a waiting request may have one reserved (continue_from)
    prefix: Prefix | None = None  # locked
    num_ahead: int = 0  # samples under way whose tokens are known already (forced): their results are dropped
    assumed: int = 0  # tokens of its row that a step under way has yet to confirm
    sequence: int = 0  # order of arrival in the scheduler
    cached_hint: int = 0  # tokens that were in the cache when it came
    access: Entry | None = None  # in the log of the prefix cache, where one is kept
    admitted: Moment | None = None  # the first time; a retracted request is admitted again

    @property
    def finished(self) -> bool:
        return self.status >= RequestStatus.STOPPED

    @property
    def num_output(self) -> int:
        return self.num_tokens - self.num_prompt

    @property
    def tokens(self) -> IntArray:
        """Prompt and output  # int32[num_tokens], a view"""
        return self.ids[: self.num_tokens]

    @property
    def plain(self) -> bool:
        """A sampled token that ends nothing only has to be shown to the matcher and stored, and sent where the request
        streams. A matcher without a grammar may be done with any token, so it is looked at each time."""
        completion = self.completion
        return (
            completion is not None
            and (self.matcher is None or self.grammar is not None)
            and completion.stops is None
            and not completion.extra_stop_ids
            and completion.num_logprobs < 0
            and not self.num_ahead
            and (completion.began or not completion.stream)
        )

    @property
    def reusable(self) -> int:
        """Leading tokens whose KV may come from the cache: the last one is always computed, for its logits, and
        so is everything from the first missing target on."""
        most = self.num_tokens - 1 if self.samples else self.end
        first = self.targets.next_position if self.targets is not None else None
        return most if first is None else min(most, first)

    def append(self, token_id: int) -> None:
        if self.num_tokens == len(self.ids):
            self.ids = np.resize(self.ids, max(16, min(2 * len(self.ids), self.limit + 1)))
        self.ids[self.num_tokens] = token_id
        self.num_tokens += 1
