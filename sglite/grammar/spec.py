"""Every kind of constraint as a canonical `GrammarSpec`, with the checks that need no engine's compile.

    json_schema   a dict, JSON text, bool, pydantic model, TypeAdapter or any type that pydantic understands
    json_object   any JSON object
    regex         the whole text matches (dialect below)
    choice        exactly one of some texts
    ebnf          GBNF as in llama.cpp, root rule `root`
    lark          Lark as in llguidance, start rule `start`
    structural_tag  xgrammar's JSON description of free text with constrained parts

Regex dialect: Rust's regex syntax, Unicode classes, on whole code points. Refused with the reason: look-around,
backreferences, word boundaries, possessive and atomic groups, anchors other than at the two ends. Beyond Rust's,
`{,n}` means `{0,n}`, as in Python. Greedy and lazy quantifiers are the same: the set of texts counts.
"""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Iterable, Mapping
from typing import Any

import llguidance
import msgspec

from sglite.errors import GrammarTooLarge, InvalidGrammar
from sglite.grammar.regex_size import regex_size
from sglite.protocol import GrammarSpec, OnUnsupported, Whitespace

# Of a constraint's text, by what it is; finer limits are the compiler's.
MAX_CHARS = {"schema": 4 << 20, "choices": 4 << 20, "structural_tag": 4 << 20, "regex": 64 << 10}
MAX_GRAMMAR_CHARS = 1 << 20
MAX_SHORTEST_BYTES = 16_384  # of the shortest text that satisfies a constraint; masks look ahead over forced text

_BETWEEN_BLANKS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[^ \t\n\r"]+', re.DOTALL)  # a string, or what is none
_COUNT_FROM_NONE = re.compile(r"(\\.|\[(?:\\.|[^\]\\])*\])|\{,(\d+)\}", re.DOTALL)


def json_schema(
    schema: Any, *, whitespace: Whitespace = "compact", on_unsupported: OnUnsupported = "error"
) -> GrammarSpec:
    """A JSON value that the schema allows. Key order of the schema is kept: it is the order of the output's keys.

    Raises InvalidGrammar for something that is no schema; what cannot be enforced is found by the compile.
    """
    source = _canonical_json(schema) if isinstance(schema, str) else _dump(_schema_of(schema))
    if source[0] not in "{tf":
        raise InvalidGrammar("a JSON schema is an object, true or false", param="schema")
    return GrammarSpec(kind="json_schema", source=source, whitespace=whitespace, on_unsupported=on_unsupported)


def json_object(*, whitespace: Whitespace = "compact") -> GrammarSpec:
    return GrammarSpec(kind="json_object", source="", whitespace=whitespace)


def regex(pattern: str) -> GrammarSpec:
    """The whole text matches `pattern`."""
    _check_text(pattern, "regex")
    source = _COUNT_FROM_NONE.sub(lambda m: m[1] or f"{{0,{m[2]}}}", pattern)
    message = _engine_error(llguidance.LLMatcher.grammar_from_regex(source))
    if message:
        raise InvalidGrammar(f"regex {shorten(pattern)!r} cannot be used: {_regex_reason(message)}", param="regex")
    shortest = regex_size(source).shortest
    if shortest > MAX_SHORTEST_BYTES:
        raise GrammarTooLarge(
            f"regex {shorten(pattern)!r} matches no text under {shortest} bytes; {MAX_SHORTEST_BYTES} is the limit",
            param="regex",
        )
    return GrammarSpec(kind="regex", source=source)


def choice(choices: Iterable[str]) -> GrammarSpec:
    """Exactly one of `choices`; repetitions count once."""
    if isinstance(choices, str):
        raise InvalidGrammar("choices must be a list of strings, not one string", param="choices")
    found = list(dict.fromkeys(choices))
    if not found:
        raise InvalidGrammar("choices must hold at least one string", param="choices")
    for text in found:
        if not isinstance(text, str) or not text:
            raise InvalidGrammar(f"every choice must be a non-empty string, not {text!r}", param="choices")
        _check_text(text, "choices")
    source = _dump(found)
    _check_text(source, "choices")
    return GrammarSpec(kind="choice", source=source)


def ebnf(grammar: str) -> GrammarSpec:
    """A text of the rule `root`."""
    _check_text(grammar, "ebnf")
    if not re.search(r"^[ \t]*root[ \t]*::=", grammar, re.MULTILINE):
        raise InvalidGrammar('an EBNF grammar needs a rule named root, e.g. `root ::= "yes" | "no"`', param="ebnf")
    return GrammarSpec(kind="ebnf", source=grammar)


def lark(grammar: str) -> GrammarSpec:
    """A text of the rule `start`."""
    _check_text(grammar, "lark")
    message = _engine_error(llguidance.LLMatcher.grammar_from_lark(grammar))
    if message:
        raise InvalidGrammar(f"the Lark grammar cannot be used: {shorten(message, 500)}", param="lark")
    return GrammarSpec(kind="lark", source=grammar)


def structural_tag(tag: str | Mapping[str, Any]) -> GrammarSpec:
    """`{"type": "structural_tag", "format": {...}}`."""
    source = _canonical_json(tag, "structural_tag") if isinstance(tag, str) else _dump(tag)
    value = _parsed(source, "structural_tag")
    if not isinstance(value, dict) or not isinstance(value.get("format"), dict):
        raise InvalidGrammar('a structural tag is {"type": "structural_tag", "format": {...}}', param="structural_tag")
    return GrammarSpec(kind="structural_tag", source=source)


def shorten(text: str, limit: int = 120) -> str:
    return text if len(text) <= limit else text[:limit] + "..."


def _schema_of(schema: Any) -> Any:
    """What `json.dumps` takes for a schema given as a Python object."""
    if isinstance(schema, bool | Mapping):
        return schema
    import pydantic  # a tenth of a second, which a start has no need of

    if isinstance(schema, pydantic.TypeAdapter):
        return schema.json_schema()
    try:
        return pydantic.TypeAdapter(schema).json_schema()
    except (pydantic.errors.PydanticUserError, pydantic.errors.PydanticSchemaGenerationError) as error:
        raise no_schema(schema, error) from error


def no_schema(given: object, error: Exception) -> InvalidGrammar:
    """What to raise for something that pydantic made no schema of."""
    if isinstance(given, type) or typing.get_origin(given) is not None:
        return InvalidGrammar(
            f"no JSON schema for {shorten(repr(given))}: {shorten(str(error).splitlines()[0], 200)}", param="schema"
        )
    return InvalidGrammar(
        "a schema is a pydantic model or another type, a TypeAdapter, a dict or JSON text, not "
        f"{shorten(repr(given))} of type {type(given).__name__}",
        param="schema",
    )


def _canonical_json(text: str, param: str = "schema") -> str:
    """The text without white space between its tokens; key order and the spelling of numbers and strings are kept."""
    _check_text(text, param)
    try:
        return msgspec.json.format(text, indent=-1)
    except (msgspec.DecodeError, RecursionError):  # no JSON, a lone surrogate, or deep nesting
        _parsed(text, param)
        return "".join(_BETWEEN_BLANKS.findall(text))


def _parsed(text: str, param: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError as error:
        raise GrammarTooLarge("the JSON text is nested too deeply", param=param) from error
    except ValueError as error:
        raise InvalidGrammar(f"{param} is a text but not JSON: {error}", param=param) from error


def _dump(value: Any) -> str:
    """ASCII, so that lone surrogates survive every encoding."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    except RecursionError as error:
        raise GrammarTooLarge("the value is nested too deeply, or contains itself", param="schema") from error
    except (TypeError, ValueError) as error:
        raise InvalidGrammar(f"not JSON: {error}", param="schema") from error


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _check_text(text: Any, param: str) -> None:
    if not isinstance(text, str):
        raise InvalidGrammar(f"{param} must be text, not {type(text).__name__}", param=param)
    limit = MAX_CHARS.get(param, MAX_GRAMMAR_CHARS)
    if len(text) > limit:
        raise GrammarTooLarge(f"{param} has {len(text)} characters; at most {limit} are read", param=param)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidGrammar(f"{param} holds a lone surrogate and cannot be UTF-8 text", param=param) from error


def _engine_error(grammar: str) -> str:
    """Why llguidance cannot parse the grammar; "" where it can. Milliseconds: nothing is compiled yet."""
    failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar)
    return messages[0] if failed else ""


def _regex_reason(message: str) -> str:
    """The last line that says why, out of a message with pictures."""
    for line in reversed(message.splitlines()):
        if "error:" in line:
            return line.split("error:", 1)[1].strip()
    return shorten(re.sub(r"\s+", " ", message.split("(in regex):")[-1].split("\n")[0]).strip(), 200)
