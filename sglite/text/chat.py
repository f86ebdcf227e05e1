"""Chat templates: Jinja2 from the model's folder, rendered in a sandbox with a budget.

A template is text that came with a model, so it gets no attribute that starts with an underscore and cannot change
what it is given. Its cost is bounded too: every loop turn and every call looks at the clock, output is counted while it
is made, and the operations that blow a value up (repeat, power, concatenation, formatting) check the size of their
result first. Templates sent with a request are refused: `render` has no parameter for one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.runtime import Context

from sglite.errors import InvalidRequest, UnsupportedModel

MAX_SECONDS = 2.0
MAX_CHARS = 16_000_000  # of one rendered prompt, and of one string or list made on the way
MAX_POWER_BITS = 4096

_BUDGET = "sglite_render_budget"
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "chat_template", _BUDGET})


class ChatTemplate:
    """A model's chat template (or its named ones: "default", "tool_use")."""

    def __init__(
        self, sources: Mapping[str, str], *, max_seconds: float = MAX_SECONDS, max_chars: int = MAX_CHARS
    ) -> None:
        """Raises UnsupportedModel for a template that is not Jinja2."""
        environment = _Environment()
        try:
            self._templates = {name: environment.from_string(source) for name, source in sources.items()}
        except (jinja2.TemplateError, RecursionError) as error:
            raise UnsupportedModel(f"the model's chat template is not valid Jinja2: {error}") from error
        self._max_seconds = max_seconds
        self._max_chars = max_chars

    @classmethod
    def from_folder(cls, folder: Path, configured: Any = None) -> ChatTemplate | None:
        """`configured` is tokenizer_config.json's entry (a text or a list of named ones); files win over it."""
        try:
            sources = _sources(folder, configured)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise UnsupportedModel(
                f"{folder}: its chat template is damaged (texts, or a list of names with texts, are read): {error!r}"
            ) from error
        return cls(sources) if sources else None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text. Raises InvalidRequest when the template refuses the messages or goes over its budget."""
        clash = sorted(_RESERVED & (variables or {}).keys())
        if clash:
            raise InvalidRequest(f"{clash[0]!r} cannot be passed to the chat template", param=clash[0])
        template = self._choose(has_tools=bool(tools))
        budget = _Budget(self._max_seconds)
        values = {
            **(variables or {}),
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            _BUDGET: budget,
        }
        try:
            return _joined(template.generate(values), budget, self._max_chars)
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"the chat template refused the messages: {error}", param="messages") from error
        except RecursionError as error:
            raise InvalidRequest("the chat template recurses too deeply", param="messages") from error
        except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError, IndexError, LookupError) as error:
            # A template written for other message shapes (content as a list, a missing field) fails like any Python.
            raise InvalidRequest(
                f"the chat template cannot render these messages: {error}", param="messages"
            ) from error

    def _choose(self, *, has_tools: bool) -> jinja2.Template:
        if has_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" in self._templates:
            return self._templates["default"]
        raise InvalidRequest(
            f"the model has chat templates {sorted(self._templates)} but no default one", param="messages"
        )


def _sources(folder: Path, configured: Any) -> dict[str, str]:
    """Templates by name. Raises ValueError, TypeError or KeyError for what is none."""
    sources: dict[str, str] = {}
    if isinstance(configured, list):
        sources.update({_text(entry["name"]): _text(entry["template"]) for entry in configured})
    elif configured is not None:
        sources["default"] = _text(configured)
    legacy = folder / "chat_template.json"
    if legacy.is_file():
        sources["default"] = _text(json.loads(legacy.read_text(encoding="utf-8"))["chat_template"])
    if (folder / "chat_template.jinja").is_file():
        sources["default"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        sources[file.stem] = file.read_text(encoding="utf-8")
    return sources


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.60} is no text")
    return value


class _OverBudget(jinja2.TemplateRuntimeError):
    """Not visible outside: render turns it into InvalidRequest like every template error."""


class _Budget:
    """The clock of one rendering. Every 64th look is a real one."""

    __slots__ = ("_deadline", "_looks")

    def __init__(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds
        self._looks = 0

    def _look(self) -> None:
        self._looks += 1
        if self._looks & 63 == 0 and time.monotonic() > self._deadline:
            raise _OverBudget("it takes too long to render")


def _joined(pieces: Iterator[str], budget: _Budget, max_chars: int) -> str:
    made: list[str] = []
    size = 0
    for piece in pieces:
        budget._look()
        size += len(piece)
        if size > max_chars:
            raise _OverBudget(f"its text is longer than {max_chars} characters")
        made.append(piece)
    return "".join(made)


class _Ticking:
    """An iterable that looks at the clock with each item. Keeps its length, which `loop` wants to know."""

    def __init__(self, items: Iterable[Any], budget: _Budget) -> None:
        self._items = items
        self._budget = budget

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            self._budget._look()
            yield item


class _SizedTicking(_Ticking):
    def __len__(self) -> int:
        return len(self._items)  # type: ignore[arg-type]


@jinja2.pass_context
def _ticking(context: Context, items: Any) -> Any:
    if isinstance(items, jinja2.Undefined):
        return items
    budget = context.parent[_BUDGET]
    return (_SizedTicking if hasattr(items, "__len__") else _Ticking)(items, budget)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The environment that transformers documents for chat templates, plus the budget."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols], autoescape=False
        )
        filters: dict[str, Callable[..., Any]] = {**self.filters, **_FILTERS}
        self.filters = {name: made for name, made in filters.items() if name not in _COSTLY}
        variables: dict[str, Any] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self.globals = {**self.globals, **variables}
        del self.globals["lipsum"]

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = _filtered(cast(nodes.Expr, loop.iter), "sglite_ticking")
        return _replace_concats(tree)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        context.parent[_BUDGET]._look()
        for value in (*args, *kwargs.values()):
            # "x".ljust(10**10), "{:9999999999}": no honest template passes such a number
            if isinstance(value, int) and abs(value) > MAX_CHARS:
                raise _OverBudget(f"the number {value} is too large for a call")
        method = getattr(obj, "__wrapped__", obj)  # Jinja wraps str.format
        if isinstance(getattr(method, "__self__", None), str):
            _check_size(_method_size(method.__self__, method.__name__, args))
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        context.parent[_BUDGET]._look()
        if operator == "+":
            _check_size(_length(left) + _length(right))
        elif operator == "*":
            _check_size(max(_length(left) * _count(right), _length(right) * _count(left)))
            _check_bits(_bits(left) + _bits(right))
        elif operator == "**":
            _check_bits(_bits(left) * max(_count(right), 0))
        elif operator == "%" and isinstance(left, str):
            _check_size(_longest_number(left))
        return super().call_binop(context, operator, left, right)


def _check_size(size: int) -> None:
    if size > MAX_CHARS:
        raise _OverBudget(f"a value on the way is longer than {MAX_CHARS}")


def _check_bits(bits: int) -> None:
    if bits > MAX_POWER_BITS:
        raise _OverBudget("a number on the way is too large")


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (str, list, tuple)) else 0


def _count(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _longest_number(text: str) -> int:
    """The largest decimal number spelled in a %-format: its widest field."""
    digits = "".join(char if char in "0123456789" else " " for char in text).split()
    return max((int(number) for number in digits if len(number) < 20), default=0) if digits else 0


def _method_size(text: str, method: str, args: Sequence[Any]) -> int:
    """At most how long `text.method(*args)` can get, for the methods that multiply."""
    if method == "replace" and len(args) >= 2:
        return (len(text) + 1) * max(len(str(args[1])), 1) if len(str(args[0])) < len(str(args[1])) else len(text)
    if method == "join" and args and isinstance(args[0], (list, tuple)):
        return len(text) * len(args[0]) + sum(_length(part) for part in args[0])
    if method in ("format", "format_map"):
        return _longest_number(text)
    return 0


def _concat(first: Any, *others: Any) -> str:
    texts = [str(part) for part in (first, *others)]
    _check_size(sum(map(len, texts)))
    return "".join(texts)


@jinja2.pass_environment
def _join(environment: jinja2.Environment, value: Iterable[Any], d: str = "", attribute: str | None = None) -> str:
    items = [item if attribute is None else environment.getitem(item, attribute) for item in value]
    _check_size(len(d) * len(items) + sum(_length(item) for item in items))
    return d.join(str(item) for item in items)


def _replace(text: Any, old: str, new: str, count: int = -1) -> str:
    _check_size(_method_size(str(text), "replace", (old, new)))
    return str(text).replace(old, new, count)


def _format(text: str, *args: Any, **kwargs: Any) -> str:
    _check_size(_longest_number(text))
    return text % (kwargs or args)


def _filtered(node: nodes.Expr, name: str, args: list[nodes.Expr] | None = None) -> nodes.Filter:
    made = nodes.Filter(node, name, args or [], [], None, None)
    made.set_lineno(node.lineno)
    if node.environment is not None:
        made.set_environment(node.environment)
    return made


def _replace_concats(tree: Any) -> Any:
    """`a ~ b` is not an interceptable operator, so it becomes a filter that checks its size."""
    for field, value in list(tree.iter_fields()):
        if isinstance(value, nodes.Node):
            setattr(tree, field, _replace_concats(value))
        elif isinstance(value, list):
            value[:] = [_replace_concats(v) if isinstance(v, nodes.Node) else v for v in value]
    if isinstance(tree, nodes.Concat):
        return _filtered(tree.nodes[0], "sglite_concat", list(tree.nodes[1:]))
    return tree


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for training; here its body is simply text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's: no HTML escapes, non-ASCII as it is (what chat templates are written for)."""
    if isinstance(indent, int) and indent > 64:
        raise _OverBudget("tojson: indent is too large")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


_FILTERS: Mapping[str, Callable[..., Any]] = {
    "tojson": _tojson,
    "join": _join,
    "replace": _replace,
    "format": _format,
    "sglite_ticking": _ticking,
    "sglite_concat": _concat,
}
_COSTLY = frozenset({"center", "wordwrap", "urlize", "pprint", "xmlattr"})  # and no use to a prompt
