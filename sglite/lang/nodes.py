"""The operations of a program, as frozen values.

`sglite.gen("x")` makes a node and does nothing else; `s += node` hands it to a state, which carries nodes out in order.
Nodes and text are put together with `+`:

    s += "Name: " + gen("name") + "\\n"
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from sglite.errors import ProgramSyntaxError
from sglite.protocol import GrammarSpec, SamplingParams

if TYPE_CHECKING:
    from sglite.lang.choices import ChoicesMethod

Role = Literal["system", "user", "assistant", "tool"]


class Node:
    """What can be appended to a state."""

    __slots__ = ()

    def __add__(self, other: object) -> Sequence:
        return Sequence((*_parts(self), *_parts(other)))

    def __radd__(self, other: object) -> Sequence:
        return Sequence((*_parts(other), *_parts(self)))

    def __format__(self, spec: str) -> NoReturn:
        raise ProgramSyntaxError(
            f'{type(self).__name__} cannot be put into an f-string; write "text" + gen(...) + "text" instead'
        )


@dataclass(frozen=True, slots=True)
class Text(Node):
    value: str


@dataclass(frozen=True, slots=True)
class Sequence(Node):
    """Nodes one after another; never nested."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenParams:
    """What one `gen`, or one run, says about sampling. None: not said here."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    n: int | None = None
    stop: tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    stop_regex: tuple[str, ...] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    return_text_in_logprobs: bool | None = None

    def over(self, defaults: GenParams) -> GenParams:
        """These where they say something, else `defaults`."""
        said = {name: value for name in self.__slots__ if (value := getattr(self, name)) is not None}
        return replace(defaults, **said) if said else defaults

    def sampling_params(self) -> SamplingParams:
        """Raises InvalidRequest for values that cannot work."""
        if self.stop is self.stop_token_ids is self.stop_regex is self.logit_bias is None:
            values = _scalars(self)
            with contextlib.suppress(TypeError):  # what has no hash is no number either, and is refused below
                return _made_before(tuple(map(type, values)), values)
        return self.made()

    def made(self) -> SamplingParams:
        wants_logprobs = bool(self.return_logprob) or self.top_logprobs_num is not None
        wants_prompt = wants_logprobs and self.logprob_start_len is not None and self.logprob_start_len >= 0
        peek = self.max_tokens == 0 and wants_logprobs  # no text, but the distribution of what would come
        return SamplingParams(
            max_tokens=1 if peek else self.max_tokens,
            min_tokens=self.min_tokens or 0,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=self.repetition_penalty,
            logit_bias=dict(self.logit_bias) if self.logit_bias else None,
            stop=self.stop or (),
            stop_regex=self.stop_regex or (),
            stop_token_ids=self.stop_token_ids or (),
            ignore_eos=bool(self.ignore_eos),
            seed=self.seed,
            logprobs=(self.top_logprobs_num or 0) if wants_logprobs else None,
            prompt_logprobs=(self.top_logprobs_num or 0) if wants_prompt else None,
            n=self.n or 1,
        )


_SCALARS = tuple(f.name for f in fields(GenParams) if "tuple" not in str(f.type))
_scalars = attrgetter(*_SCALARS)


@lru_cache(maxsize=256)
def _made_before(types: tuple[type, ...], values: tuple[Any, ...]) -> SamplingParams:
    """Programs make the same generations in each run: what was checked once is not checked again. By type too: 1.0 is
    refused where 1 is not."""
    return GenParams(**dict(zip(_SCALARS, values, strict=True))).made()


@dataclass(frozen=True, slots=True, kw_only=True)
class Gen(Node):
    """Let the model write. `parse` turns the text into what `s[name]` gives (None: the text itself)."""

    name: str | None = None
    params: GenParams = GenParams()
    grammar: GrammarSpec | None = None
    parse: Callable[[str], Any] | None = field(default=None, compare=False)
    close_on_budget: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Select(Node):
    """Let the model choose one of some texts. `temperature` 0 takes the best one."""

    name: str | None = None
    choices: tuple[str, ...]
    temperature: float = 0.0
    method: ChoicesMethod
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class RoleBegin(Node):
    role: str


@dataclass(frozen=True, slots=True)
class RoleEnd(Node):
    role: str


@dataclass(frozen=True, slots=True)
class ScopeBegin(Node):
    """From here to the matching ScopeEnd, what is appended becomes the variable `name`."""

    name: str


@dataclass(frozen=True, slots=True)
class ScopeEnd(Node):
    name: str


@dataclass(frozen=True, slots=True)
class SeparateReasoning(Node):
    """Cut what `names` were given into reasoning and answer, by the markers of a model family."""

    names: tuple[str, ...]
    model_type: str


@dataclass(frozen=True, slots=True)
class Image(Node):
    source: Any


def as_node(value: object) -> Node:
    """Text becomes a Text node. Raises ProgramSyntaxError for what cannot be appended."""
    if isinstance(value, Node):
        return value
    if isinstance(value, str):
        return Text(value)
    traced = getattr(value, "__sglite_node__", None)
    if callable(traced) and isinstance(node := traced(), Node):
        return node
    if value is None:
        raise ProgramSyntaxError("None cannot be appended to a state; did a function forget to return its text?")
    raise ProgramSyntaxError(
        f"{type(value).__name__} cannot be appended to a state; use str(...) or a node like gen(...)"
    )


def flatten(node: Node) -> tuple[Node, ...]:
    return node.parts if isinstance(node, Sequence) else (node,)


def _parts(value: object) -> tuple[Node, ...]:
    return flatten(as_node(value))
