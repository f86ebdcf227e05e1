"""/generate and its companions: SGLang's native fields."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from sglite.runtime.server.schemas.common import Body, TokenId


class GenerateBody(Body):
    text: str | list[str] | None = None
    input_ids: list[TokenId] | list[list[TokenId]] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    rid: Annotated[str, Field(max_length=128)] | list[str] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    return_text_in_logprobs: bool = False
    stream: bool = False
    image_data: Any = None  # refused: no vision model
    priority: int | None = None


class TokenizeBody(Body):
    """`prompt` or `text`, as vLLM and SGLang call it."""

    model: str | None = None
    prompt: str | None = None
    text: str | None = None
    add_special_tokens: bool = True


class DetokenizeBody(Body):
    model: str | None = None
    tokens: list[TokenId]
    skip_special_tokens: bool = False


class AbortBody(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    rid: Annotated[str, Field(max_length=256)] | None = None
    request_id: Annotated[str, Field(max_length=256)] | None = None
    abort_all: bool = False
