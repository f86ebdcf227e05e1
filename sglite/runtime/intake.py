"""From API requests to the scheduler's: validation, defaults, limits. Whatever is refused here has cost nothing."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable, Sequence

import numpy as np
import regex

from sglite.errors import InvalidRequest, OutOfPages, PromptTooLong
from sglite.protocol import GenerateRequest, SamplingParams, ScoreRequest
from sglite.runtime.batch import GREEDY, IntArray, RowSampling
from sglite.runtime.cache.radix_tree import Namespace
from sglite.runtime.completion import Completion
from sglite.runtime.config import EngineConfig, SamplingDefaults
from sglite.runtime.request import Job, Request
from sglite.runtime.scheduler.held import HeldRow
from sglite.runtime.scoring import ScoreTrie, Targets
from sglite.runtime.stop import StopChecker, compile_stop_regex
from sglite.text.detokenizer import Detokenizer
from sglite.text.types import TextTokenizer

_MAX_BIASES = 4096
_MAX_STOPS = 64
_MAX_CONTINUATIONS = 16384
_MAX_PROMPT_LOGPROBS = 1 << 20  # prompt tokens x (1 + alternatives) of one request
_UINT64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


class Intake:
    """`vocab_size`: ids that a prompt may hold. `cache_tokens`: what the whole KV cache holds."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        config: EngineConfig,
        defaults: SamplingDefaults,
        *,
        max_model_len: int,
        vocab_size: int,
        cache_tokens: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._config = config
        self._defaults = defaults
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._cache_tokens = cache_tokens
        self._stop_ids = frozenset(tokenizer.stop_token_ids)
        self._seeds = random.Random(config.seed)

    def generate(self, source: GenerateRequest, now: float, held: HeldRow | None = None) -> Job:
        """The job of a completion request; `held` is the row that it continues. Raises InvalidRequest and its kin."""
        params = source.sampling_params
        self._check_params(params)
        patterns = [compile_stop_regex(p) for p in params.stop_regex]
        ids = self._continued(held, source)
        wants_text = params.max_tokens != 0
        if source.truncate_prompt:
            reserve = min(params.max_tokens or int(wants_text), self._max_model_len // 2)
            ids = ids[-(self._max_model_len - reserve) :]
        self._check_length(len(ids), wants_text=wants_text)
        if params.prompt_logprobs is not None and len(ids) * (1 + params.prompt_logprobs) > _MAX_PROMPT_LOGPROBS:
            raise InvalidRequest(
                f"prompt_logprobs={params.prompt_logprobs} for {len(ids)} prompt tokens is too much in one answer",
                param="prompt_logprobs",
            )
        job = Job(source.request_id, source, now, source.priority, source.program)
        seed = self._seeds.getrandbits(64) if params.seed is None else params.seed
        for index in range(params.n):
            job.requests.append(self._completion(job, index, ids, params, patterns, seed))
        job.num_open = params.n
        return job

    def score(self, source: ScoreRequest, now: float, held: HeldRow | None = None) -> Job:
        """The job of a scoring: one request per row of the continuations' trie, of which the first continues `held`."""
        ids = self._continued(held, source)
        if len(source.continuations) > _MAX_CONTINUATIONS:
            raise InvalidRequest(f"at most {_MAX_CONTINUATIONS} continuations in one request", param="continuations")
        for tokens in source.continuations:
            self._check_ids(tokens, "continuations")
        longest = max(map(len, source.continuations), default=0)
        self._check_length(len(ids) + longest, wants_text=False)
        job = Job(source.request_id, source, now, source.priority, source.program)
        job.num_prompt = len(ids)
        job.trie = ScoreTrie(len(ids), source.continuations)
        for index, row in enumerate(job.trie.rows):
            tokens = np.concatenate([ids, row.tokens])
            request = self._compute_only(job, index, tokens, len(tokens), source.namespace)
            request.targets = row.targets
            if not len(row.targets.positions):
                request.end = 0  # no continuation has a token: nothing to compute
            job.requests.append(request)
        job.num_open = len(job.requests)
        return job

    def warm(self, request_id: str, token_ids: Sequence[int], *, namespace: str, lease_until: float, now: float) -> Job:
        """The job of computing a prefix for later."""
        ids = self._prompt_ids(tuple(token_ids))
        self._check_length(len(ids), wants_text=False)
        job = Job(request_id, None, now, lease_until=lease_until, num_prompt=len(ids))
        job.requests.append(self._compute_only(job, 0, ids, len(ids), namespace))
        job.num_open = 1
        return job

    # -- requests

    def _completion(
        self,
        job: Job,
        index: int,
        ids: IntArray,
        params: SamplingParams,
        patterns: Sequence[regex.Pattern[str]],
        seed: int,
    ) -> Request:
        source = job.source
        assert isinstance(source, GenerateRequest)
        num_prompt = len(ids)
        limit = self._max_model_len
        if params.max_tokens is not None:
            limit = min(limit, num_prompt + params.max_tokens)
        samples = limit > num_prompt
        own_stops = frozenset(params.stop_token_ids) - self._stop_ids
        ignores_eos = params.ignore_eos and source.grammar is None
        stops = None
        if params.stop or patterns:
            stops = StopChecker(
                params.stop,
                patterns,
                include_stop=params.include_stop,
                budget_s=self._config.stop_regex_budget_s,
            )
        num_logprobs = -1 if params.logprobs is None else params.logprobs
        sampling = self._sampling(params, (seed ^ (index * _GOLDEN)) & _UINT64)
        wants_prompt = params.prompt_logprobs is not None and index == 0
        request = Request(
            job=job,
            index=index,
            ids=_with_room(ids, min(limit, num_prompt + 1024)),
            num_tokens=num_prompt,
            num_prompt=num_prompt,
            limit=limit,
            end=limit - 1 if samples else 0,
            samples=samples,
            sampling=sampling,
            namespace=Namespace(tenant=source.namespace),
            completion=Completion(
                detokenizer=Detokenizer(
                    self._tokenizer, skip_special_tokens=params.skip_special_tokens, context=ids[-8:].tolist()
                ),
                stops=stops,
                stop_ids=own_stops if ignores_eos else own_stops | self._stop_ids,
                extra_stop_ids=own_stops,
                min_tokens=params.min_tokens,
                stream=source.stream,
                num_logprobs=num_logprobs,
                # with logprobs every token goes through the sampler, which reports them
                jump_forward=source.jump_forward and self._config.jump_forward and num_logprobs < 0,
                include_stop=params.include_stop,
            ),
        )
        if wants_prompt:
            positions = np.arange(num_prompt - 1, dtype=np.int32)
            request.targets = Targets(positions, ids[1:].copy(), params.prompt_logprobs or 0)
            if not samples:
                request.end = num_prompt - 1
        return request

    def _compute_only(self, job: Job, index: int, ids: IntArray, end: int, namespace: str) -> Request:
        return Request(
            job=job,
            index=index,
            ids=ids,
            num_tokens=len(ids),
            num_prompt=len(ids),
            limit=len(ids),
            end=end,
            samples=False,
            sampling=GREEDY,
            namespace=Namespace(tenant=namespace),
        )

    def _sampling(self, params: SamplingParams, seed: int) -> RowSampling:
        defaults = self._defaults
        logprobs = [p for p in (params.logprobs, params.prompt_logprobs) if p is not None]
        return RowSampling(
            temperature=_or(params.temperature, defaults.temperature),
            top_p=_or(params.top_p, defaults.top_p),
            top_k=max(0, defaults.top_k if params.top_k is None else params.top_k),
            min_p=_or(params.min_p, defaults.min_p),
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=_or(params.repetition_penalty, defaults.repetition_penalty),
            logit_bias=tuple(sorted((params.logit_bias or {}).items())),
            seed=seed & _UINT64,
            logprobs=min(max(logprobs, default=-1), self._vocab_size),
        )

    # -- checks

    def _prompt_ids(self, prompt: str | tuple[int, ...]) -> IntArray:
        """Token ids  # int32[n >= 1], a fresh array"""
        ids = self._tokenizer.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else prompt
        if not len(ids):
            if self._tokenizer.bos_token_id is None:
                raise InvalidRequest(
                    "the prompt is empty and the model has no start token; give it some text", param="prompt"
                )
            ids = (self._tokenizer.bos_token_id,)
        return self._check_ids(ids, "prompt")

    def _continued(self, held: HeldRow | None, source: GenerateRequest | ScoreRequest) -> IntArray:
        """The whole prompt's ids, a fresh array."""
        if held is None:
            return self._prompt_ids(source.prompt)
        most = len(held.tokens)
        keep = most if source.keep is None else source.keep
        if not 0 <= keep <= most:
            raise InvalidRequest(f"keep must lie between 0 and the {most} tokens of the held row", param="keep")
        if not keep:
            return self._prompt_ids(source.prompt)
        more = self._tokenizer.encode(source.prompt) if isinstance(source.prompt, str) else source.prompt
        return np.concatenate([held.tokens[:keep], self._check_ids(more, "prompt")])

    def _check_ids(self, given: Sequence[int], param: str) -> IntArray:
        try:
            ids = _as_array(given)
            if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
                raise TypeError
        except (TypeError, ValueError, OverflowError):
            raise InvalidRequest(f"{param}: token ids must be whole numbers of the vocabulary", param=param) from None
        if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < self._vocab_size):
            wrong = next(int(i) for i in ids if not 0 <= i < self._vocab_size)
            raise InvalidRequest(f"token id {wrong} is not in the vocabulary of {self._vocab_size}", param=param)
        return ids.astype(np.int32, copy=ids is given)

    def _check_some_ids(self, ids: Iterable[int], param: str) -> None:
        for token_id in ids:
            if not 0 <= token_id < self._vocab_size:
                raise InvalidRequest(
                    f"{param}: token id {token_id} is not in the vocabulary of {self._vocab_size}", param=param
                )

    def _check_length(self, num_tokens: int, *, wants_text: bool) -> None:
        longest = self._max_model_len - wants_text
        if num_tokens > longest:
            raise PromptTooLong(
                f"the prompt has {num_tokens} tokens and the context holds {self._max_model_len}"
                f"{' with at least one for the answer' if wants_text else ''}; shorten it or set truncate_prompt",
                param="prompt",
            )
        if num_tokens > self._cache_tokens:
            raise OutOfPages(
                f"the prompt has {num_tokens} tokens and the KV cache holds {self._cache_tokens} in all;"
                " give the engine more KV memory or shorten it"
            )

    def _check_params(self, params: SamplingParams) -> None:
        if params.n > self._config.max_completions:
            raise InvalidRequest(f"n={params.n} is more than {self._config.max_completions}", param="n")
        self._check_some_ids(params.stop_token_ids, "stop_token_ids")
        self._check_some_ids(params.logit_bias or (), "logit_bias")
        if len(params.logit_bias or ()) > _MAX_BIASES:
            raise InvalidRequest(f"logit_bias may name at most {_MAX_BIASES} tokens", param="logit_bias")
        if len(params.stop) + len(params.stop_regex) + len(params.stop_token_ids) > _MAX_STOPS:
            raise InvalidRequest(f"at most {_MAX_STOPS} stops in all", param="stop")


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _as_array(given: Sequence[int]) -> IntArray:
    """Of a tuple by way of a packed array: numpy looks at each id twice, which many long prompts would wait for."""
    if isinstance(given, tuple) and given:
        try:
            return np.frombuffer(array("i", given), np.int32)
        except OverflowError:
            pass  # an id that is in no vocabulary, and can be named
    return np.asarray(given)


def _with_room(ids: IntArray, size: int) -> IntArray:
    buffer = np.empty(max(size, len(ids)), np.int32)
    buffer[: len(ids)] = ids
    return buffer
