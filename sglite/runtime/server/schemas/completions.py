"""/v1/completions."""

from __future__ import annotations

from sglite.runtime.server.schemas.chat import ResponseFormat
from sglite.runtime.server.schemas.common import (
    ConstraintFields,
    Count,
    IgnoredFields,
    SamplingFields,
    StreamOptions,
)
from sglite.runtime.server.schemas.prompts import Prompt


class CompletionRequest(SamplingFields, ConstraintFields, IgnoredFields):
    model: str | None = None
    prompt: Prompt
    max_tokens: Count | None = 16
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None
    response_format: ResponseFormat | None = None
