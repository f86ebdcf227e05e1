"""Pieces of answers in OpenAI's shape that several routes share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from sglite.protocol import Coverage, FinishReason, TokenLogprob, Usage
from sglite.text.types import TextTokenizer

# JSON has no -inf. What a mask or a bias has ruled out is told as this; values are before the grammar's mask.
LOWEST_LOGPROB = -9999.0


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST_LOGPROB


def finish_reason(reason: FinishReason | None, *, called: bool) -> str | None:
    """OpenAI's word; "schema_violation" has none and stays itself."""
    if reason is None:
        return None
    if reason in (FinishReason.STOP, FinishReason.GRAMMAR):
        return "tool_calls" if called else "stop"
    return str(reason)


def usage(counts: Usage, *, reasoning_tokens: int = 0) -> dict[str, Any]:
    return {
        "prompt_tokens": counts.prompt_tokens,
        "completion_tokens": counts.completion_tokens,
        "total_tokens": counts.prompt_tokens + counts.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": counts.cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": reasoning_tokens,
            "forced_tokens": counts.forced_tokens,
            "accepted_prediction_tokens": counts.accepted_draft_tokens,
            "rejected_prediction_tokens": counts.draft_tokens - counts.accepted_draft_tokens,
        },
    }


def token_text(tokenizer: TextTokenizer, token_id: int) -> str:
    return tokenizer.decode([token_id], skip_special_tokens=False)


def chat_logprobs(tokenizer: TextTokenizer, logprobs: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
    return [
        {
            **_chat_token(tokenizer, entry.token_id, entry.logprob),
            "top_logprobs": [_chat_token(tokenizer, token_id, logprob) for token_id, logprob in entry.top],
        }
        for entry in logprobs
    ]


def completion_logprobs(
    tokenizer: TextTokenizer, logprobs: Sequence[TokenLogprob | None], *, token_ids: Sequence[int], offset: int
) -> dict[str, Any]:
    """The older shape: parallel lists, keyed by text. `offset`: characters before the first token."""
    tokens = [token_text(tokenizer, token_id) for token_id in token_ids]
    offsets: list[int] = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [None if e is None else finite(e.logprob) for e in logprobs],
        "top_logprobs": [
            None if e is None else {token_text(tokenizer, t): finite(p) for t, p in reversed(e.top)} for e in logprobs
        ],
        "text_offset": offsets,
    }


def unenforced(coverage: Coverage | None) -> list[dict[str, str]]:
    """What of the request's schemas no mask carried. Empty for an exact one."""
    return [
        {"pointer": item.pointer, "keyword": item.keyword, "status": item.status, "reason": item.reason}
        for item in (coverage.items if coverage is not None else ())
        if item.status in ("validated", "unsupported")
    ]


def _chat_token(tokenizer: TextTokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    data = tokenizer.token_bytes(token_id)
    return {"token": token_text(tokenizer, token_id), "logprob": finite(logprob), "bytes": list(data) or None}
