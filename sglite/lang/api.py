"""The functions that programs are written with: `import sglite as sgl`, then `sgl.gen`, `sgl.select`, `sgl.user`, ...

Each makes a node (nodes.py) after checking its arguments: a mistake is an error at the call, before anything runs.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, overload

from sglite.errors import ProgramSyntaxError, SgliteError
from sglite.lang.choices import ChoicesMethod, token_length_normalized
from sglite.lang.config import global_config, unwrap
from sglite.lang.nodes import (
    Gen,
    GenParams,
    Image,
    Node,
    RoleBegin,
    RoleEnd,
    Select,
    SeparateReasoning,
    Sequence,
    as_node,
    flatten,
)
from sglite.lang.program import Program
from sglite.protocol import OnUnsupported, Whitespace

if TYPE_CHECKING:
    from sglite.lang.schema import Constraint

P = ParamSpec("P")
T = TypeVar("T")
Dtype = type | Literal["int", "float", "str", "bool"]

# Arguments of gen() that may stand beside `choices`. SGLang's programs give max_tokens there: no choice contradicts it.
_WITH_CHOICES = frozenset({"name", "choices", "choices_method", "temperature", "seed", "max_tokens"})
_CONSTRAINTS = ("dtype", "regex", "json_schema", "schema", "ebnf", "lark")
_DEFAULTS = {"whitespace": "compact", "on_unsupported": "error", "close_on_budget": False}


@overload
def function(func: Callable[..., Any], /) -> Program: ...
@overload
def function(*, num_api_spec_tokens: int | None = None) -> Callable[[Callable[..., Any]], Program]: ...
def function(
    func: Callable[..., Any] | None = None, /, *, num_api_spec_tokens: int | None = None
) -> Program | Callable[[Callable[..., Any]], Program]:
    """Make a program of a function whose first parameter is the state (after `self` in a method; `async def` too).

    `num_api_spec_tokens` is taken for SGLang's sake: it saves calls of paid APIs there and changes no output.
    """
    return Program if func is None else Program(func)


def _naming_the_variable(make: Callable[P, T]) -> Callable[P, T]:
    """What `make` refuses says which variable it was for, so that the program's error names it."""

    @functools.wraps(make)
    def made(*args: P.args, **kwargs: P.kwargs) -> T:
        name = args[0] if args else kwargs.get("name")
        if not isinstance(name, str | None):
            raise ProgramSyntaxError(f"the name of a variable is a text, not {name!r}", param="name")
        try:
            return make(*args, **kwargs)
        except SgliteError as error:
            error.variable = name
            raise

    return made


@_naming_the_variable
def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    n: int | None = None,
    stop: str | Iterable[str] | None = None,
    stop_token_ids: Iterable[int] | None = None,
    stop_regex: str | Iterable[str] | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    ignore_eos: bool | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
    dtype: Dtype | None = None,
    choices: Iterable[str] | None = None,
    choices_method: ChoicesMethod | None = None,
    regex: str | None = None,
    json_schema: str | Mapping[str, Any] | None = None,
    *,
    schema: Any = None,
    ebnf: str | None = None,
    lark: str | None = None,
    whitespace: Whitespace = "compact",
    on_unsupported: OnUnsupported = "error",
    close_on_budget: bool = False,
    seed: int | None = None,
    repetition_penalty: float | None = None,
    logit_bias: Mapping[int, float] | None = None,
) -> Node:
    """Let the model write here; `s[name]` is what it wrote.

    At most one constraint: `schema` (pydantic model, TypeAdapter, dict, JSON text or any type pydantic knows; `s[name]`
    is the validated object and `s.raw(name)` the text), `json_schema` (the text), `regex`, `dtype` (int, float, str or
    bool; gives text), `ebnf`, `lark`, or `choices` (see `select`; `max_tokens` may stand beside them and cuts
    no choice). `n` > 1 gives a list; the program goes on with the first. `close_on_budget`: when max_tokens nears,
    finish the JSON value validly, where the backend can.
    What is not given comes from `run(...)`, then from the model; `max_tokens` is 128 unless said.

    Raises ProgramSyntaxError, GrammarError or InvalidRequest for arguments that cannot work.
    """
    if choices is not None:
        given = [k for k, v in locals().items() if k not in _WITH_CHOICES and v != _DEFAULTS.get(k)]
        given.sort(key=lambda k: k not in _CONSTRAINTS)  # the weightiest is named
        if given:
            raise ProgramSyntaxError(f"choices and {given[0]} exclude each other", param=given[0])
        GenParams(max_tokens=max_tokens).sampling_params()
        return select(name, choices, temperature or 0.0, choices_method or token_length_normalized, seed=seed)
    if choices_method is not None:
        raise ProgramSyntaxError("choices_method needs choices", param="choices_method")
    params = GenParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        n=n,
        stop=_texts("stop", stop),
        stop_token_ids=_several("stop_token_ids", stop_token_ids, "a list of token ids"),
        stop_regex=_texts("stop_regex", stop_regex),
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        repetition_penalty=repetition_penalty,
        logit_bias=_biases(logit_bias),
        ignore_eos=ignore_eos,
        seed=seed,
        return_logprob=return_logprob,
        logprob_start_len=logprob_start_len,
        top_logprobs_num=top_logprobs_num,
        return_text_in_logprobs=return_text_in_logprobs,
    )
    params.sampling_params()  # a value that cannot work is refused here and not when the program runs
    wanted = {"dtype": dtype, "regex": regex, "json_schema": json_schema, "schema": schema, "ebnf": ebnf, "lark": lark}
    wanted = {k: v for k, v in wanted.items() if v is not None}
    if len(wanted) > 1:
        raise ProgramSyntaxError(f"{' and '.join(wanted)} exclude each other", param=list(wanted)[1])
    if not wanted:
        return Gen(name=name, params=params)
    ((kind, value),) = wanted.items()
    made = _constraint(kind, value, whitespace, on_unsupported)
    if made.stop:
        params = GenParams(stop=(*(params.stop or ()), *made.stop)).over(params)
    return Gen(
        name=name,
        params=params,
        grammar=made.spec,
        parse=made.parse,
        close_on_budget=close_on_budget,
    )


def gen_int(
    name: str | None = None,
    max_tokens: int | None = None,
    n: int | None = None,
    stop: str | Iterable[str] | None = None,
    stop_token_ids: Iterable[int] | None = None,
    stop_regex: str | Iterable[str] | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    ignore_eos: bool | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
) -> Node:
    """`gen(dtype=int)`: the text of a whole number."""
    return gen(**locals(), dtype=int)


def gen_string(
    name: str | None = None,
    max_tokens: int | None = None,
    n: int | None = None,
    stop: str | Iterable[str] | None = None,
    stop_token_ids: Iterable[int] | None = None,
    stop_regex: str | Iterable[str] | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    ignore_eos: bool | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
) -> Node:
    """`gen(dtype=str)`: the text of a JSON string, with its quotes."""
    return gen(**locals(), dtype=str)


@_naming_the_variable
def select(
    name: str | None = None,
    choices: Iterable[str] | None = None,
    temperature: float = 0.0,
    choices_method: ChoicesMethod = token_length_normalized,
    *,
    seed: int | None = None,
) -> Select:
    """Let the model choose one of `choices`; `s[name]` is the chosen text.

    `choices_method` scores the options (choices.py). With `temperature` above 0 the choice is drawn, in proportion to
    exp(score / temperature). Raises ProgramSyntaxError.
    """
    if choices is None or isinstance(choices, str):
        raise ProgramSyntaxError("choices must be a list of texts", param="choices")
    options = _several("choices", choices, "a list of texts")
    if not options:
        raise ProgramSyntaxError("choices must hold at least one text", param="choices")
    for option in options:
        if not isinstance(option, str) or not option:
            raise ProgramSyntaxError(f"every choice must be a non-empty text, not {option!r}", param="choices")
    GenParams(temperature=temperature).sampling_params()
    return Select(name=name, choices=options, temperature=temperature, method=choices_method, seed=seed)


def system(expr: object = None) -> Node:
    return _role("system", expr)


def user(expr: object = None) -> Node:
    return _role("user", expr)


def assistant(expr: object = None) -> Node:
    return _role("assistant", expr)


def system_begin() -> RoleBegin:
    return RoleBegin("system")


def system_end() -> RoleEnd:
    return RoleEnd("system")


def user_begin() -> RoleBegin:
    return RoleBegin("user")


def user_end() -> RoleEnd:
    return RoleEnd("user")


def assistant_begin() -> RoleBegin:
    return RoleBegin("assistant")


def assistant_end() -> RoleEnd:
    return RoleEnd("assistant")


def image(source: object) -> Image:
    """An image in the prompt. No vision model is supported yet, so running it is an error that says so."""
    return Image(source)


def video(path: str, num_frames: int) -> Image:
    """As `image`: an error when it runs."""
    return Image((path, num_frames))


def separate_reasoning(expr: object, model_type: str = "deepseek-r1") -> Node:
    """Run `expr`, then cut what it generated: `s[name]` keeps the answer, `s[name + "_reasoning_content"]` the
    reasoning, and the state goes on with the answer alone. `model_type`: see reasoning.py."""
    parts = flatten(as_node(expr))
    importlib.import_module("sglite.lang.reasoning").markers_of(model_type)
    names = tuple(p.name for p in parts if isinstance(p, Gen | Select) and p.name is not None)
    if not names:
        raise ProgramSyntaxError("separate_reasoning needs a gen with a name")
    return Sequence((*parts, SeparateReasoning(names, model_type)))


def set_default_backend(backend: Any) -> None:
    """What programs run on where `backend=` is not given: an Engine, a RuntimeEndpoint, an OpenAI, ..."""
    global_config.default_backend = None if backend is None else unwrap(backend)


def flush_cache(backend: Any = None, empty_cache: bool = True) -> bool:
    """Drop the cached prefixes that no running request uses. False without a backend or when something was kept."""
    client = global_config.default_backend if backend is None else unwrap(backend)
    if client is None or not empty_cache:
        return False
    return importlib.import_module("sglite.lang.bridge").program_loop().run(client.flush_cache())


def get_server_info(backend: Any = None) -> dict[str, Any] | None:
    """What is known of the model behind a backend."""
    client = global_config.default_backend if backend is None else unwrap(backend)
    if client is None:
        return None
    info = client.model_info
    return {f: getattr(info, f) for f in info.__struct_fields__}


def _role(role: str, expr: object) -> Node:
    inner = () if expr is None else flatten(as_node(expr))
    return Sequence((RoleBegin(role), *inner, RoleEnd(role)))


def _texts(argument: str, value: str | Iterable[str] | None) -> tuple[str, ...] | None:
    return (value,) if isinstance(value, str) else _several(argument, value, "a text or a list of texts")


@overload
def _several(argument: str, value: Iterable[T], what: str) -> tuple[T, ...]: ...
@overload
def _several(argument: str, value: Iterable[T] | None, what: str) -> tuple[T, ...] | None: ...
def _several(argument: str, value: Iterable[T] | None, what: str) -> tuple[T, ...] | None:
    if value is not None and not isinstance(value, Iterable):
        raise ProgramSyntaxError(f"{argument} must be {what}, not {value!r}", param=argument)
    return None if value is None else tuple(value)


def _biases(value: Mapping[int, float] | None) -> tuple[tuple[int, float], ...] | None:
    if value is not None and not isinstance(value, Mapping):
        raise ProgramSyntaxError(f"logit_bias maps token ids to numbers, it is not {value!r}", param="logit_bias")
    return None if value is None else tuple(sorted(value.items()))


def _constraint(kind: str, value: Any, whitespace: Whitespace, on_unsupported: OnUnsupported) -> Constraint:
    # Imported when the first constraint is made: it brings pydantic and the grammar engines, about 0.3 s.
    schema = importlib.import_module("sglite.lang.schema")
    return schema.constraint(kind, value, whitespace=whitespace, on_unsupported=on_unsupported)
