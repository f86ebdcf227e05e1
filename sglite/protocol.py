"""The plain values that cross a boundary: between program and engine, process and process, client and server.

All are frozen msgspec structs: hashable where their fields are, encoded with msgpack or JSON without
pickle, validated when made. Nothing here imports torch, numpy or another part of sglite than errors.
"""

from __future__ import annotations

import enum
import hashlib
import math
import numbers
import operator
from array import array
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from sglite.errors import InvalidGrammar, InvalidRequest, SgliteError, UnsupportedSchema, error_types

GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "ebnf", "lark", "structural_tag", "tools"]
OnUnsupported = Literal["error", "validate"]
Whitespace = Literal["compact", "single"]  # none at all | at most one blank after ':' and ','

MAX_LOGPROBS = 100
MAX_BIAS = 1e20  # what penalties and temperature make of it is a float32 still


class FinishReason(enum.StrEnum):
    STOP = "stop"  # a stop id, stop string or stop regex
    LENGTH = "length"  # max_tokens or the context's end
    GRAMMAR = "grammar"  # the grammar allowed nothing more (reported as "stop" by the OpenAI routes)
    SCHEMA_VIOLATION = "schema_violation"  # on_unsupported="validate": the value is complete and wrong
    ABORT = "abort"
    ERROR = "error"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are chosen and when to stop. `None` means "the model's generation_config, else the neutral value".

    Raises InvalidRequest for values that cannot work.
    """

    max_tokens: int | None = None  # None: to the context's end. 0: nothing (prompt logprobs still come)
    min_tokens: int = 0  # stop ids and stop texts are ignored before that many; a grammar's end wins
    temperature: float | None = None  # 0: greedy
    top_p: float | None = None
    top_k: int | None = None  # <= 0: off
    min_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None  # 1.0: off; counts prompt and output, as transformers does
    logit_bias: dict[int, float] | None = None
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False  # keep the stop text at the end of the output
    ignore_eos: bool = False
    seed: int | None = None  # None: drawn by the engine. Same seed, same text, whoever shares the batch
    logprobs: int | None = None  # None: off; k >= 0: the chosen token's and the k best
    prompt_logprobs: int | None = None
    n: int = 1
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        self._settle_types()
        for name, low, high in (
            ("temperature", 0.0, 100.0),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("presence_penalty", -2.0, 2.0),
            ("frequency_penalty", -2.0, 2.0),
            ("repetition_penalty", 1e-3, 100.0),
        ):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and low <= value <= high):
                raise InvalidRequest(f"{name} must be a number from {low:g} to {high:g}, not {value!r}", param=name)
        if self.top_p == 0:
            raise InvalidRequest("top_p must be above 0; for greedy decoding use temperature=0", param="top_p")
        for name, least in (("max_tokens", 0), ("min_tokens", 0), ("n", 1), ("logprobs", 0), ("prompt_logprobs", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise InvalidRequest(f"{name} must be at least {least}, not {value}", param=name)
        for name, limit in (("max_tokens", 2**31), ("min_tokens", 2**31), ("n", 2**31), ("seed", 2**64)):
            value = getattr(self, name)
            if value is not None and not 0 <= value < limit:
                raise InvalidRequest(f"{name} must lie between 0 and {limit - 1}", param=name)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest("min_tokens is larger than max_tokens", param="min_tokens")
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(self, name) or 0) > MAX_LOGPROBS:
                raise InvalidRequest(f"{name} must be at most {MAX_LOGPROBS}", param=name)
        if any(not s for s in self.stop) or any(not s for s in self.stop_regex):
            raise InvalidRequest("a stop text must not be empty", param="stop")
        for bias in (self.logit_bias or {}).values():
            if not abs(bias) <= MAX_BIAS:
                raise InvalidRequest(
                    f"logit_bias values must lie between -{MAX_BIAS:g} and {MAX_BIAS:g}", param="logit_bias"
                )

    def _settle_types(self) -> None:
        """Values of another type with the same meaning (numpy's numbers, lists, one stop text) become ours. msgspec
        checks types where it decodes, not where a program calls the constructor. Raises InvalidRequest."""
        for name in ("max_tokens", "min_tokens", "top_k", "seed", "logprobs", "prompt_logprobs", "n"):
            value = getattr(self, name)
            if type(value) is not int and (value is not None or name in ("min_tokens", "n")):
                msgspec.structs.force_setattr(self, name, _whole(value, name))
        if self.top_k is not None and not -_INT32 <= self.top_k < _INT32:
            raise InvalidRequest(f"top_k must lie between {-_INT32} and {_INT32 - 1}", param="top_k")
        for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
            value = getattr(self, name)
            if type(value) is not float and (value is not None or name in ("presence_penalty", "frequency_penalty")):
                msgspec.structs.force_setattr(self, name, _real(value, name))
        for name in ("include_stop", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(f"{name} must be true or false, not {getattr(self, name)!r}", param=name)
        for name in ("stop", "stop_regex"):
            value = getattr(self, name)
            texts = (value,) if isinstance(value, str) else _items(value, name)
            if not all(isinstance(text, str) for text in texts):
                raise InvalidRequest(f"{name} must hold texts, not {value!r}", param=name)
            if texts is not value:
                msgspec.structs.force_setattr(self, name, texts)
        if not isinstance(self.stop_token_ids, tuple) or self.stop_token_ids:
            ids = tuple(_token(i, "stop_token_ids") for i in _items(self.stop_token_ids, "stop_token_ids"))
            msgspec.structs.force_setattr(self, "stop_token_ids", ids)
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, dict):
                raise InvalidRequest("logit_bias maps token ids to numbers", param="logit_bias")
            biases = {_token(i, "logit_bias"): _real(b, "logit_bias") for i, b in self.logit_bias.items()}
            msgspec.structs.force_setattr(self, "logit_bias", biases)


_INT32 = 1 << 31


def _whole(value: Any, name: str) -> int:
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise InvalidRequest(f"{name} must be a whole number, not {value!r}", param=name)


def _real(value: Any, name: str) -> float:
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            pass
    raise InvalidRequest(f"{name} must be a number, not {value!r}", param=name)


def _token(value: Any, name: str) -> int:
    token_id = _whole(value, name)
    if not -_INT32 <= token_id < _INT32:
        raise InvalidRequest(f"{name}: {token_id} is no token id", param=name)
    return token_id


def _items(value: Any, name: str) -> tuple[Any, ...]:
    if isinstance(value, tuple):
        return value
    if isinstance(value, list | set | frozenset):
        return tuple(value)
    raise InvalidRequest(f"{name} must be a list, not {value!r}", param=name)


class GrammarSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A constraint in canonical form; hashable, so that it is its own cache key.

    `source`: json_schema: the schema as JSON text with its key order kept; json_object: "";
    regex/ebnf/lark: the text; choice: a JSON list of strings; structural_tag and tools: JSON text.
    Made by `sglite.grammar.spec`, which checks and canonicalises.
    """

    kind: GrammarKind
    source: str
    whitespace: Whitespace = "compact"
    on_unsupported: OnUnsupported = "error"


class ProgramRef(msgspec.Struct, frozen=True, kw_only=True):
    """Which program a request belongs to and what the program will do next.

    `wanted_again`: how many of the (prompt + output) tokens a later call of the program reads again
    (-1: all of them, 0: none); the cache leases them until then. `remaining`: calls on the longest path
    from here to the program's end. `siblings`: how many calls are admitted together with this one.
    """

    program_id: str
    parent: str | None = None  # the request_id whose tokens this one continues
    arrival: float = 0.0  # time.monotonic() of the program's start, seconds
    remaining: int = 0
    siblings: int = 1
    wanted_again: int = 0


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One completion (or `sampling_params.n` of them) of one prompt.

    `prompt` is text or token ids; ids are taken as they are. `heal`: the prompt's last token may have
    been cut where the author's text ended: drop it and constrain the next tokens to continue its bytes.
    `hold`: keep the row and its KV after the end, so that `continue_from` may append to it without a new
    admission: the new prompt is what comes after the first `keep` tokens of the held prompt and output. One that has
    not ended yet may be continued too, by any number of requests: they wait for its end.
    `grammar_after`: token ids (a reasoning model's end-of-thinking marker) after which the grammar begins; empty: at
    once. `think_budget`: at most that many tokens before `grammar_after` is forced. `deadline`: time.monotonic()
    seconds after which the request is aborted.
    """

    request_id: str
    prompt: str | tuple[int, ...]
    sampling_params: SamplingParams = SamplingParams()
    grammar: GrammarSpec | None = None
    heal: bool = False
    close_on_budget: bool = False
    grammar_after: tuple[int, ...] = ()
    think_budget: int | None = None
    jump_forward: bool = True
    stream: bool = True  # False: one RequestOutput, at the end (detokenised once)
    program: ProgramRef | None = None
    hold: bool = False
    continue_from: str | None = None
    keep: int | None = None  # tokens of the held row that the prompt follows; None: all
    priority: int = 0  # smaller runs earlier
    namespace: str = ""  # cache namespace: never shares a page with another one
    truncate_prompt: bool = False  # keep the last tokens that fit instead of raising PromptTooLong
    deadline: float | None = None


class ScoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities of each continuation given the prompt; all continuations share the prompt's KV.

    Continuations may share prefixes with each other: shared tokens are computed once. `hold`, `continue_from` and
    `keep` are those of a GenerateRequest; what is held is the prompt.
    """

    request_id: str
    prompt: str | tuple[int, ...]
    continuations: tuple[tuple[int, ...], ...]
    program: ProgramRef | None = None
    hold: bool = False
    continue_from: str | None = None
    keep: int | None = None
    priority: int = 0
    namespace: str = ""


def ids_digest(ids: Sequence[int]) -> str:
    """The same for the same token ids, in any process."""
    return hashlib.blake2b(array("q", ids).tobytes(), digest_size=16).hexdigest()


class ProgramCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A call of a program whose state a server keeps: exactly one of `generate` and `score`, which name the program.

    The prompt is the first `keep` tokens (-1: all) of what the call `base` read and wrote, and then what the request
    brings. One with all of them may be sent while `base` runs.
    `after`: outputs of this very call that the client has got already; it is not made again, they go on from there.
    `released`: rows of earlier calls that no call will continue.
    """

    generate: GenerateRequest | None = None
    score: ScoreRequest | None = None
    base: str | None = None
    keep: int = 0
    after: int = 0
    released: tuple[str, ...] = ()


class ProgramFrame(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a client asks a server for at one moment: calls of any of its programs. Each is an encoded ProgramCall, so
    that a wrong one is refused by itself. `given_up`: (program, call) of calls that nobody waits for; `ended`: programs
    that are over."""

    calls: tuple[msgspec.Raw, ...] = ()
    given_up: tuple[tuple[str, str], ...] = ()
    ended: tuple[str, ...] = ()


class CallAnswer(msgspec.Struct, frozen=True, array_like=True):
    """What is new of a frame's call, by its number there. `over`: nothing follows. `error`: in place of an answer, in
    the shape of the server's error bodies, with its "status"."""

    call: int
    over: bool = False
    generated: RequestOutput | None = None
    scored: ScoreOutput | None = None
    error: dict[str, Any] | None = None


class TokenLogprob(msgspec.Struct, frozen=True):
    """Natural-log probabilities at one position. `masked` is after the grammar's mask (None: no grammar)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), best first, before the mask
    masked: float | None = None


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts. `forced_tokens` (decided by grammar or program) are part of `completion_tokens`."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    forced_tokens: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(**{f: getattr(self, f) + getattr(other, f) for f in Usage.__struct_fields__})


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request's time went in the engine. Moments are time.monotonic() seconds of its process.

    `steps`: steps of the engine from the admission to the end, `step_s`: the seconds that these took. A scoring, or n
    completions, tell of their first row.
    """

    arrived: float = 0.0
    admitted: float = 0.0  # got a row; 0: never
    finished: float = 0.0
    steps: int = 0
    step_s: float = 0.0

    @property
    def queue_s(self) -> float:
        return max(0.0, (self.admitted or self.finished) - self.arrived)


class CoverageItem(msgspec.Struct, frozen=True):
    """What became of one assertion keyword of a schema."""

    pointer: str  # JSON pointer of the keyword in the schema as given, e.g. "/properties/a/maxLength"
    keyword: str
    status: Literal["mask", "rewritten", "redundant", "validated", "annotation", "unsupported"]
    reason: str = ""


MOST_ITEMS = 500
_CARRIED = ("mask", "rewritten", "redundant", "annotation")


class Coverage(msgspec.Struct, frozen=True):
    """What becomes of a constraint. Of a schema with more than 500 assertions an engine names those alone that its mask
    does not carry: it tells with every answer."""

    items: tuple[CoverageItem, ...] = ()
    engine: str = ""  # which grammar engine carries it
    reason: str = ""  # why that one

    @property
    def exact(self) -> bool:
        """True when the mask alone enforces every assertion."""
        return all(i.status in _CARRIED for i in self.items)

    def brief(self) -> Coverage:
        """The same, of many assertions only those that the mask does not carry."""
        if len(self.items) <= MOST_ITEMS:
            return self
        return Coverage(tuple(i for i in self.items if i.status not in _CARRIED), self.engine, self.reason)


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An error of the tree in errors.py as a plain value."""

    type: str
    message: str
    param: str | None = None
    pointer: str | None = None
    keyword: str | None = None
    retry_after: float | None = None

    @staticmethod
    def of(error: BaseException) -> ErrorInfo:
        """An error outside the tree keeps its text but becomes a plain SgliteError."""
        if not isinstance(error, SgliteError):
            return ErrorInfo(type="SgliteError", message=f"{type(error).__name__}: {error}")
        return ErrorInfo(
            type=type(error).__name__,
            message=error.reason if isinstance(error, UnsupportedSchema) else error.message,
            param=error.param,
            pointer=getattr(error, "pointer", None),
            keyword=getattr(error, "keyword", None),
            retry_after=getattr(error, "retry_after", None),
        )

    def to_exception(self) -> SgliteError:
        cls = error_types().get(self.type, SgliteError)
        if issubclass(cls, UnsupportedSchema):
            unsupported = cls(self.message, pointer=self.pointer or "", keyword=self.keyword or "")
            unsupported.param = self.param or unsupported.param
            return unsupported
        if issubclass(cls, InvalidGrammar):
            return cls(self.message, param=self.param, pointer=self.pointer, keyword=self.keyword)
        error = cls(self.message, param=self.param)
        if self.retry_after is not None:
            error.retry_after = self.retry_after  # type: ignore[attr-defined]
        return error


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What is new of one completion since the last output with the same (request_id, index).

    Concatenated `text` of a stream is the whole text, never half a character; the same for `token_ids`. A stop id
    is no part of them unless include_stop (usage counts it); after a stop text they run on to the token that
    completed it. A healed request's first ids spell the dropped prompt token again, its text does not.
    The last one has a `finish_reason`. `usage` counts from the start of the request.
    """

    request_id: str
    index: int = 0  # which of the n completions
    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    matched_stop: str | int | None = None  # the stop text or id that ended it
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()  # first output only; entry 0 is None
    prompt_token_ids: tuple[int, ...] = ()  # first output only
    usage: Usage = Usage()
    coverage: Coverage | None = None  # last output of a constrained request
    reason: str = ""  # of a schema_violation or an abort
    timing: Timing | None = None  # last output only
    error: ErrorInfo | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


class ScoreOutput(msgspec.Struct, frozen=True, kw_only=True):
    """`logprobs[i][j]`: log-probability of token j of continuation i given the prompt and its first j tokens."""

    request_id: str
    logprobs: tuple[tuple[float, ...], ...] = ()
    usage: Usage = Usage()
    timing: Timing | None = None
    error: ErrorInfo | None = None


GraphOp = Literal[
    "text", "argument", "variable", "gen", "select", "set", "reasoning",
    "role_begin", "role_end", "scope_begin", "scope_end", "fork", "join", "concatenate",
]  # fmt: skip


class GraphNode(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One operation of a traced program. Its number is its place in `ProgramGraph.nodes`.

    `name`: the variable that it sets, the argument or variable that it reads, or the role. `source`: the node whose
    value a "variable" is (with `entry`: which of the values that a join put together). `children`: the branches of a
    fork or join. `step`: the operation's number in a run that goes the same way.
    """

    op: GraphOp
    branch: int = 0  # 0 is the program's own state, others begin at a fork
    step: int = 0
    text: str = ""
    name: str | None = None
    source: int | None = None
    entry: int | None = None
    params: SamplingParams | None = None
    grammar: GrammarSpec | None = None
    choices: tuple[str, ...] = ()
    method: str = ""
    temperature: float = 0.0
    children: tuple[int, ...] = ()


class ProgramGraph(msgspec.Struct, frozen=True, kw_only=True):
    """What a program does as far as it is known before it runs: its operations in program order.

    `arguments` were left open. `complete`: the whole program is here; else `stopped` says at what the trace ended.
    `exact`: every use of an open value is a node. False where one was turned into a Python string, which the program
    may have looked at.
    """

    name: str
    nodes: tuple[GraphNode, ...]
    arguments: tuple[str, ...] = ()
    complete: bool = True
    exact: bool = True
    stopped: str = ""

    def __str__(self) -> str:
        head = f"program {self.name}({', '.join(self.arguments)})"
        lines = [f"%{i:<3} {'    ' * bool(node.branch)}{_spoken(node)}" for i, node in enumerate(self.nodes)]
        return "\n".join([head, *lines, *([] if self.complete else [f"...  depends on data: {self.stopped}"])])


class GraphRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A program's graph to be run by a server, with texts for the arguments that it left open. `stream`: answers are
    told piece by piece; else once, at the end of each."""

    graph: ProgramGraph
    arguments: dict[str, str] = {}
    stream: bool = False


class GraphAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a call; a generation streams several of them. `call`: "state.number", where number counts the
    state's calls from 1. `prompt`: digest of the prompt's ids, with the first one."""

    call: str
    prompt: str = ""
    generated: RequestOutput | None = None
    scored: ScoreOutput | None = None


def _spoken(node: GraphNode) -> str:
    where = f"[{node.branch}] " if node.branch else ""
    match node.op:
        case "text":
            what = f"text {node.text!r}"
        case "argument":
            what = f"argument {node.name}"
        case "variable":
            what = f"variable {node.name} of %{node.source}" + ("" if node.entry is None else f"[{node.entry}]")
        case "gen":
            limit = "" if node.params is None else f" max_tokens={node.params.max_tokens}"
            what = f"gen {node.name or ''}{limit}" + (f" {node.grammar.kind}" if node.grammar else "")
        case "select":
            what = f"select {node.name or ''} of {', '.join(map(repr, node.choices))}"
        case "fork" | "join" | "concatenate":
            what = f"{node.op} {', '.join(f'[{child}]' for child in node.children)}"
        case _:
            what = f"{node.op} {node.name or ''}"
    return where + what.rstrip()


def merge_outputs(outputs: list[RequestOutput]) -> RequestOutput:
    """The whole of one completion from the pieces of its stream (same request_id and index, in order)."""
    first, last = outputs[0], outputs[-1]
    if first is last:
        return first
    return msgspec.structs.replace(
        last,
        text="".join(o.text for o in outputs),
        token_ids=tuple(t for o in outputs for t in o.token_ids),
        logprobs=tuple(p for o in outputs for p in o.logprobs),
        prompt_logprobs=first.prompt_logprobs,
        prompt_token_ids=first.prompt_token_ids,
    )


def without_prompt(output: RequestOutput, prompt: tuple[int, ...]) -> RequestOutput:
    """For a reader who knows the prompt's ids already: all of them or, of a healed one, all but the last were used."""
    used = output.prompt_token_ids
    return msgspec.structs.replace(output, prompt_token_ids=()) if used and used == prompt[: len(used)] else output


def with_prompt(output: RequestOutput, prompt: tuple[int, ...]) -> RequestOutput:
    """The first output of a call as it was before `without_prompt`."""
    if output.prompt_token_ids:
        return output
    return msgspec.structs.replace(output, prompt_token_ids=prompt[: output.usage.prompt_tokens])


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a client needs to know of the model behind an engine or a server."""

    name: str
    architecture: str = ""
    vocab_size: int = 0
    max_model_len: int = 0
    bos_token_id: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    has_chat_template: bool = False
    extra: dict[str, Any] = {}
