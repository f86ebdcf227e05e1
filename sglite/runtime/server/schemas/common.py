"""What the APIs share: sampling fields with the bounds that no limit of the server can widen."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
Number = Annotated[float, Field(allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**64 - 1)]


# No option of the server can allow more: what is longer is refused before its parts are looked at, and of a list that
# is wrong only the first wrong part is told, so that no body makes the server think for long.
MAX_ITEMS = 16_384
_MAX_FIELDS = 128

T = TypeVar("T")
Several = Annotated[list[T], Field(max_length=MAX_ITEMS, fail_fast=True)]
Choices = Annotated[list[str], Field(max_length=8 * MAX_ITEMS, fail_fast=True)]
Entries = Annotated[dict[str, T], Field(max_length=MAX_ITEMS)]


class Body(BaseModel):
    """A request body: strict types, no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > _MAX_FIELDS:
            raise ValueError(f"the body has {len(value)} fields; this server knows no request with that many")
        return value


class Loose(BaseModel):
    """A part of a body that clients send back with whatever they were given in it; unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True)


class SamplingFields(Body):
    """Sampling in OpenAI's words, and this server's own beside them (an OpenAI client sends those as `extra_body`)."""

    temperature: Number | None = None
    top_p: Number | None = None
    n: int | None = None
    stop: str | Several[str] | None = None
    seed: Seed | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: Entries[Number] | None = None

    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    min_tokens: Count | None = None
    stop_token_ids: Several[TokenId] | None = None
    stop_regex: str | Several[str] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    truncate_prompt: bool = False


class ConstraintFields(Body):
    """Constraints beside `response_format`; at most one."""

    regex: str | None = None
    choice: Choices | None = None
    choices: Choices | None = None  # as in Python and on the command line
    ebnf: str | None = None
    lark: str | None = None
    structural_tag: dict[str, Any] | str | None = None
    json_schema: dict[str, Any] | str | None = None
    guided_json: dict[str, Any] | str | None = None  # vLLM's names
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    structured_outputs: dict[str, Any] | None = None
    whitespace: Literal["compact", "single"] = "compact"
    on_unsupported: Literal["error", "validate"] | None = None
    close_on_budget: bool = False
    jump_forward: bool = True


class IgnoredFields(Body):
    """Fields of OpenAI's that change nothing here: bookkeeping and hints for OpenAI's own service."""

    user: str | None = None
    metadata: Entries[Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class StreamOptions(Loose):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class FunctionSpec(Loose):
    name: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_.-]+$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
