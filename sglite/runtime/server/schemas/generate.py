"""/generate and its companions: SGLang's native fields."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from sglite.runtime.server.schemas.common import Body, Count, Loose, Several
from sglite.runtime.server.schemas.prompts import IdList, Ids, Texts


class ProgramFields(Loose):
    """Which program a call belongs to; see sglite.protocol.ProgramRef. When it began is for the server to say."""

    program_id: Annotated[str, Field(min_length=1, max_length=128)]
    parent: Annotated[str, Field(max_length=128)] | None = None
    remaining: Count = 0
    siblings: Annotated[int, Field(ge=1, le=2**31 - 1)] = 1
    wanted_again: Annotated[int, Field(ge=-1, le=2**31 - 1)] = 0


class GenerateBody(Body):
    text: Texts | None = None
    input_ids: Ids | None = None
    sampling_params: dict[str, Any] | Several[dict[str, Any]] | None = None
    rid: Annotated[str, Field(max_length=128)] | Several[str] | None = None
    return_logprob: bool | Several[bool] | None = None
    logprob_start_len: int | Several[int] | None = None
    top_logprobs_num: int | Several[int] | None = None
    return_text_in_logprobs: bool = False
    stream: bool = False
    image_data: Any = None  # refused: no vision model
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None

    # This server's own: what its programs send along.
    program: ProgramFields | None = None
    heal: bool = False
    close_on_budget: bool = False
    jump_forward: bool = True
    truncate_prompt: bool = False
    whitespace: Literal["compact", "single"] = "compact"
    on_unsupported: Literal["error", "validate"] = "error"


class TokenizeBody(Body):
    """`prompt` or `text`, as vLLM and SGLang call it."""

    model: str | None = None
    prompt: str | None = None
    text: str | None = None
    add_special_tokens: bool = True


class DetokenizeBody(Body):
    model: str | None = None
    tokens: IdList
    skip_special_tokens: bool = False


class AbortBody(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    rid: Annotated[str, Field(max_length=256)] | None = None
    request_id: Annotated[str, Field(max_length=256)] | None = None
    abort_all: bool = False
