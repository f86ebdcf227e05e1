"""`@sglite.function`: a Python function as a program that can be run, batched, streamed, traced and compiled."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, overload
from weakref import WeakKeyDictionary

from sglite.errors import ProgramSyntaxError
from sglite.lang.nodes import GenParams
from sglite.protocol import ProgramGraph
from sglite.text.types import TextTokenizer

if TYPE_CHECKING:
    from sglite.lang.batch import Batch
    from sglite.lang.bridge import Pace
    from sglite.lang.compiled import CompiledProgram
    from sglite.lang.habits import Habits
    from sglite.lang.outlook import Outlook, Place
    from sglite.lang.roles import Roles
    from sglite.lang.state import OnError, ProgramState
    from sglite.lang.transcript import Segments


class RunOptions(TypedDict, total=False):
    """Sampling for every `gen` of a run that says nothing itself. Not given: the model's own, 128 tokens."""

    max_new_tokens: int
    min_new_tokens: int
    stop: str | Iterable[str]
    stop_token_ids: Iterable[int]
    stop_regex: str | Iterable[str]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    ignore_eos: bool
    seed: int
    return_logprob: bool
    logprob_start_len: int
    top_logprobs_num: int
    return_text_in_logprobs: bool


class _Kept:
    """What a program and those made of it (bound, planned, methods) remember together."""

    def __init__(self) -> None:
        self.tools: WeakKeyDictionary[TextTokenizer, tuple[Segments, Roles]] = WeakKeyDictionary()
        self.pace: Pace | None = None
        self.habits: Habits | None = None


class Program:
    """`run(...)` takes the function's arguments, RunOptions, `backend=` and `stream=`, all by name where unclear.

    A parameter of the function that has the name of an option gets the argument.
    """

    def __init__(
        self,
        func: Callable[..., Any],
        bound: Mapping[str, Any] | None = None,
        *,
        plan: Mapping[Place, Outlook] | None = None,
        graph: ProgramGraph | None = None,
    ) -> None:
        """`plan`: what follows each call, and `graph`, of a compiled program.

        Raises ProgramSyntaxError for a function without a parameter for the state.
        """
        if isinstance(func, Program):
            raise ProgramSyntaxError(f"{func!r} is a program already")
        if inspect.isgeneratorfunction(func) or inspect.isasyncgenfunction(func):
            raise ProgramSyntaxError(f"{_name(func)} holds a yield; a program returns, and what it appends is streamed")
        functools.update_wrapper(self, func)
        self.func = func
        self.bound = dict(bound or {})
        self.plan = dict(plan or {})
        self.graph = graph
        self._signature = inspect.signature(func)
        if not self._signature.parameters:
            raise ProgramSyntaxError(f"{func!r} needs a first parameter for the state, as in def {_name(func)}(s, ...)")
        self._kept = _Kept()

    @overload
    def __get__(self, instance: None, owner: type) -> Program: ...
    @overload
    def __get__(self, instance: object, owner: type) -> Program: ...
    def __get__(self, instance: object | None, owner: type) -> Program:
        """In a class body: a method, whose state comes after `self`."""
        if instance is None:
            return self
        made = Program(functools.partial(self.func, instance), self.bound, plan=self.plan, graph=self.graph)
        made._kept = self._kept
        functools.update_wrapper(made, self.func)
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """`run`, or `run_async` for an async function."""
        return self.run_async(*args, **kwargs) if self.is_async else self.run(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<sglite program {_name(self.func)}{self._signature}>"

    @property
    def is_async(self) -> bool:
        func = self.func.func if isinstance(self.func, functools.partial) else self.func
        return inspect.iscoroutinefunction(func)

    @property
    def arg_names(self) -> list[str]:
        """The function's parameters after the state."""
        return list(self._signature.parameters)[1:]

    @property
    def name(self) -> str:
        return _name(self.func)

    @property
    def required_names(self) -> list[str]:
        """Of those, the ones without a default."""
        parameters = list(self._signature.parameters.values())[1:]
        kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        return [p.name for p in parameters if p.default is p.empty and p.kind not in kinds]

    def bind(self, **kwargs: Any) -> Program:
        """The same program with some arguments given. Raises ProgramSyntaxError for names it does not have."""
        self._check_names(kwargs)
        made = Program(self.func, {**self.bound, **kwargs}, plan=self.plan)
        made._kept = self._kept
        return made

    def planned(self, plan: Mapping[Place, Outlook], graph: ProgramGraph) -> Program:
        """The same program, knowing what follows each of its calls."""
        made = Program(self.func, self.bound, plan=plan, graph=graph)
        made._kept = self._kept
        return made

    def run(
        self, *args: Any, backend: Any = None, stream: bool = False, trace: bool = False, **kwargs: Any
    ) -> ProgramState:
        """Run to the end, or with `stream` return at once and give the text through `text_iter`. `trace` records what
        happened when in `state.timeline`.

        Works inside a running event loop too. Raises ProgramError for whatever goes wrong in the program.
        """
        arguments, params = self._split(args, kwargs)
        return _runner().run(self, arguments, params, backend=backend, stream=stream, timeline=trace)

    async def run_async(
        self, *args: Any, backend: Any = None, stream: bool = False, trace: bool = False, **kwargs: Any
    ) -> ProgramState:
        """As `run`. An async function runs in the event loop of the caller."""
        arguments, params = self._split(args, kwargs)
        return await _runner().run_async(self, arguments, params, backend=backend, stream=stream, timeline=trace)

    def stream(self, *args: Any, backend: Any = None, **kwargs: Any) -> ProgramState:
        return self.run(*args, backend=backend, stream=True, **kwargs)

    @overload
    def run_batch(
        self,
        batch_kwargs: Iterable[Mapping[str, Any] | Sequence[Any]],
        *,
        backend: Any = None,
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        generator_style: Literal[False] = False,
        on_error: OnError = "raise",
        **options: Unpack[RunOptions],
    ) -> list[ProgramState]: ...
    @overload
    def run_batch(
        self,
        batch_kwargs: Iterable[Mapping[str, Any] | Sequence[Any]],
        *,
        backend: Any = None,
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        generator_style: Literal[True],
        on_error: OnError = "raise",
        **options: Unpack[RunOptions],
    ) -> Iterator[ProgramState]: ...
    def run_batch(
        self,
        batch_kwargs: Iterable[Mapping[str, Any] | Sequence[Any]],
        *,
        backend: Any = None,
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        generator_style: bool = False,
        on_error: OnError = "raise",
        **options: Unpack[RunOptions],
    ) -> list[ProgramState] | Iterator[ProgramState]:
        """One run for each dict (or tuple) of arguments, all at once; the states in the order of the arguments.

        `num_threads` is how many programs run at the same time ("auto": batch.AUTO_PROGRAMS); threads stay few whatever
        it is, but for functions that read from a state inside a `with` block of theirs, which may hold a lock: these
        have one each. `generator_style` yields each state when it and all before it are done. on_error="raise": the
        first error stops the others and is raised; "return": a failed program's state is returned in its place; its
        `error()` is the ProgramError caused by what went wrong, reads from it raise that, its repr says it.
        """
        batch = self._batch(batch_kwargs, dict(options), backend, num_threads, progress_bar, on_error)
        return iter(batch) if generator_style else batch.states()

    async def run_batch_async(
        self,
        batch_kwargs: Iterable[Mapping[str, Any] | Sequence[Any]],
        *,
        backend: Any = None,
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        on_error: OnError = "raise",
        **options: Unpack[RunOptions],
    ) -> AsyncIterator[ProgramState]:
        """`async for state in program.run_batch_async(...)`: as run_batch in generator style."""
        batch = self._batch(batch_kwargs, dict(options), backend, num_threads, progress_bar, on_error)
        async with contextlib.aclosing(aiter(batch)) as states:
            async for state in states:
                yield state

    def trace(self, *, backend: Any = None, **arguments: Any) -> ProgramGraph:
        """Run the function with placeholders for arguments that are not given and for all that a model would write.

        Nothing is generated, so `backend` (SGLang's) is not needed. The graph ends where the program's way depends on a
        value that is not there; `str(graph)` is readable.
        """
        self._check_names(arguments)
        return importlib.import_module("sglite.lang.trace").trace(self, arguments)

    def compile(self, *, backend: Any = None, **arguments: Any) -> CompiledProgram:
        """Trace, check every constraint, and make schemas and the static prefix ready on the backend.

        Raises GrammarError for a constraint that cannot be enforced, InvalidRequest for parameters that cannot work.
        """
        self._check_names(arguments)
        return importlib.import_module("sglite.lang.compiled").compile_program(self, arguments, backend=backend)

    def cache(self, backend: Any = None) -> int:
        """Make the static prefix ready on the backend. Returns its tokens."""
        return importlib.import_module("sglite.lang.compiled").warm_static_prefix(self, backend=backend)

    def tools(self, tokenizer: TextTokenizer) -> tuple[Segments, Roles]:
        """What this program keeps for a tokenizer: its tokenised static texts and the chat template's pieces."""
        found = self._kept.tools.get(tokenizer)
        if found is None:
            segments = importlib.import_module("sglite.lang.transcript").Segments(tokenizer)
            found = self._kept.tools[tokenizer] = (
                segments,
                importlib.import_module("sglite.lang.roles").roles_of(tokenizer),
            )
        return found

    @property
    def pace(self) -> Pace:
        """Whether its function is known to give its thread back quickly."""
        found = self._kept.pace
        if found is None:
            found = self._kept.pace = importlib.import_module("sglite.lang.bridge").Pace()
        return found

    @property
    def habits(self) -> Habits:
        """What it did behind its calls in the runs so far."""
        found = self._kept.habits
        if found is None:
            found = self._kept.habits = importlib.import_module("sglite.lang.habits").Habits()
        return found

    def arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """By name. Raises ProgramSyntaxError where they do not fit the function."""
        try:
            bound = self._signature.bind(None, *args, **{**self.bound, **kwargs})
        except TypeError as error:
            raise ProgramSyntaxError(f"{_name(self.func)}: {error}") from error
        state, *_ = self._signature.parameters
        found = dict(bound.arguments)
        found.pop(state, None)
        for name, parameter in self._signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                found.update(found.pop(name, {}))
            elif parameter.kind is parameter.VAR_POSITIONAL and name in found:
                raise ProgramSyntaxError(f"{_name(self.func)}: a program cannot take *{name}")
        return found

    def _split(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[dict[str, Any], GenParams]:
        options = {k: v for k, v in kwargs.items() if k in RunOptions.__annotations__ and k not in self.arg_names}
        rest = {k: v for k, v in kwargs.items() if k not in options}
        return self.arguments(args, rest), run_params(options)

    def _batch(
        self,
        batch_kwargs: Iterable[Mapping[str, Any] | Sequence[Any]],
        options: dict[str, Any],
        backend: Any,
        num_threads: int | Literal["auto"],
        progress_bar: bool,
        on_error: OnError,
    ) -> Batch:
        if isinstance(batch_kwargs, Mapping | str) or not isinstance(batch_kwargs, Iterable):
            raise ProgramSyntaxError("run_batch takes a list of argument dicts (or tuples), one for each program")
        arguments = [self._one_of_batch(number, given) for number, given in enumerate(batch_kwargs)]
        unknown = [name for name in options if name not in RunOptions.__annotations__]
        if unknown:
            raise ProgramSyntaxError(f"run_batch does not know the option {unknown[0]!r}")
        return importlib.import_module("sglite.lang.batch").Batch(
            self,
            arguments,
            run_params(options),
            backend=backend,
            limit=num_threads,
            progress_bar=progress_bar,
            on_error=on_error,
        )

    def _one_of_batch(self, number: int, given: Mapping[str, Any] | Sequence[Any]) -> dict[str, Any]:
        if isinstance(given, Mapping):
            return self.arguments((), given)
        if isinstance(given, str | bytes) or not isinstance(given, Iterable):
            raise ProgramSyntaxError(
                f"program {number} of the batch: its arguments are a dict or a tuple, ({given!r:.40},) for one, "
                f"not {given!r:.40}"
            )
        return self.arguments(tuple(given), {})

    def _check_names(self, given: Mapping[str, Any]) -> None:
        takes_any = any(p.kind is p.VAR_KEYWORD for p in self._signature.parameters.values())
        unknown = [name for name in given if name not in self.arg_names]
        if unknown and not takes_any:
            raise ProgramSyntaxError(
                f"{_name(self.func)} has no parameter {unknown[0]!r}; it has {', '.join(self.arg_names) or 'none'}"
            )


def run_params(options: Mapping[str, Any]) -> GenParams:
    """Raises InvalidRequest for values that cannot work."""
    values = {k: v for k, v in options.items() if v is not None}
    renamed = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
    values = {renamed.get(k, k): v for k, v in values.items()}
    for name in ("stop", "stop_regex"):
        if name in values:
            values[name] = (values[name],) if isinstance(values[name], str) else tuple(values[name])
    if "stop_token_ids" in values:
        values["stop_token_ids"] = tuple(values["stop_token_ids"])
    params = GenParams(**values)
    params.sampling_params()
    return params


def _name(func: Callable[..., Any]) -> str:
    return getattr(func, "__name__", None) or getattr(getattr(func, "func", None), "__name__", "program")


def _runner() -> Any:
    # Imported at the first run: it brings asyncio and greenlet, which defining programs does not need.
    return importlib.import_module("sglite.lang.runner")
