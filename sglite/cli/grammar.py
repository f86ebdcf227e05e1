"""`sglite grammar check` and `sglite grammar explain`: what a schema accepts, and how it is enforced."""

from __future__ import annotations

import json
from typing import Any, NoReturn

import msgspec
import typer

from sglite.cli.files import read_bytes, read_text
from sglite.errors import GrammarError, GrammarTimeout, GrammarViolation, InvalidRequest
from sglite.grammar import bitmask, instance, spec
from sglite.grammar.compiler import GrammarCompiler
from sglite.grammar.matcher import CompiledGrammar, Matcher
from sglite.grammar.schema import PreparedSchema, prepare
from sglite.grammar.vocab import Vocab
from sglite.protocol import Coverage, ErrorInfo, GrammarSpec, OnUnsupported

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)

_REFUSED = 2  # exit status

_SCHEMA = typer.Option(..., "--schema", help="File with a JSON schema; '-' is standard input.")
_VALIDATE = typer.Option(
    False, "--validate", help="Take keywords that no mask enforces, and hold complete values against them."
)


@app.command()
def check(
    instances: list[str] = typer.Argument(..., help="Files with one JSON value each; '-' is standard input."),
    schema: str = _SCHEMA,
    reorder: bool = typer.Option(False, "--reorder", help="Put keys into the schema's order first."),
    raw: bool = typer.Option(False, "--raw", help="Feed the file's bytes as they are."),
    validate: bool = _VALIDATE,
    model: str | None = typer.Option(
        None, "--model", help="Use this model's tokens. By default one token a byte: the answer is the same."
    ),
) -> None:
    """Feed each instance token by token, then the end, to the schema's constraint.

    Prints one JSON line an instance, {"instance": ..., "accepted": true|false}; exit status 0. A refused schema prints
    {"error": {...}} with keyword and JSON pointer; exit status 2.
    """
    if raw and reorder:
        raise InvalidRequest("--raw feeds the bytes as they are; it cannot be combined with --reorder")
    wanted = _spec(schema, validate)
    compiler = GrammarCompiler(Vocab.of_bytes() if model is None else _vocab_of(model))
    try:
        grammar = compiler.compile_now(wanted)
        prepared = _prepare(wanted) if reorder else None
        for name in instances:
            _emit({"instance": name, **_checked(read_bytes(name), grammar, prepared, compiler.vocab, raw=raw)})
    except (GrammarError, GrammarTimeout) as error:
        _refuse(error)
    finally:
        compiler.close()


@app.command()
def explain(
    schema: str = _SCHEMA,
    validate: bool = _VALIDATE,
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object instead of a table."),
) -> None:
    """Show what becomes of each keyword, which engine carries the schema, and why."""
    compiler = GrammarCompiler(Vocab.of_bytes())
    try:
        coverage = compiler.compile_now(_spec(schema, validate)).coverage
    except (GrammarError, GrammarTimeout) as error:
        _refuse(error)
    finally:
        compiler.close()
    if as_json:
        _emit({**msgspec.to_builtins(coverage), "exact": coverage.exact})
    else:
        _print_table(coverage)


def _spec(schema: str, validate: bool) -> GrammarSpec:
    on_unsupported: OnUnsupported = "validate" if validate else "error"
    text = read_text(schema)
    try:
        return spec.json_schema(text, on_unsupported=on_unsupported)
    except GrammarError as error:
        _refuse(error)


def _prepare(wanted: GrammarSpec) -> PreparedSchema:
    return prepare(wanted.source, on_unsupported=wanted.on_unsupported, whitespace=wanted.whitespace)


def _checked(
    data: bytes, grammar: CompiledGrammar, prepared: PreparedSchema | None, vocab: Vocab, *, raw: bool
) -> dict[str, Any]:
    try:
        if not raw:
            value = instance.parse(data.decode("utf-8-sig"))
            data = instance.compact(value if prepared is None else prepared.reorder(value))
        text = data.decode()
    except (InvalidRequest, UnicodeDecodeError) as error:
        return {"accepted": False, "reason": str(error)}
    accepted = _accepted(grammar.matcher(), vocab.encode(text), vocab)
    if not accepted or grammar.coverage.exact:
        return {"accepted": accepted}
    reason = grammar.validate(text)
    return {"accepted": True} if reason is None else {"accepted": False, "reason": reason}


def _accepted(matcher: Matcher, token_ids: list[int], vocab: Vocab) -> bool:
    """Whether the matcher takes the tokens and then the end. As in decoding a mask is made before each token: the
    engine counts what a step may cost from there."""
    row = bitmask.empty(vocab.size)
    try:
        for token_id in token_ids:
            matcher.fill(row)
            if not matcher.accept((token_id,)):
                return False
    except GrammarViolation:
        return False
    return matcher.accept(vocab.stop_ids[:1]) == 1


def _vocab_of(model: str) -> Vocab:
    # Here and not at the top: a check with the byte vocabulary needs no model and starts five times as fast.
    from sglite.runtime.models.sources import resolve_model
    from sglite.text.tokenizer import Tokenizer

    return Vocab.of(Tokenizer.from_folder(resolve_model(model).folder))


def _refuse(error: GrammarError | GrammarTimeout) -> NoReturn:
    info = ErrorInfo.of(error)
    _emit({"error": {"type": info.type, "message": str(error), "keyword": info.keyword, "pointer": info.pointer}})
    raise typer.Exit(_REFUSED)


def _emit(value: Any) -> None:
    print(json.dumps(value, ensure_ascii=False), flush=True)


def _print_table(coverage: Coverage) -> None:
    rows = [("pointer", "keyword", "status", "reason")]
    rows += [(item.pointer or "/", item.keyword, item.status, item.reason) for item in coverage.items]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, [*widths, 0], strict=True)).rstrip())
    print(f"\nengine  {coverage.engine}: {coverage.reason}")
    print(
        f"exact   {'yes: the mask alone enforces every assertion' if coverage.exact else 'no: the rest is validated'}"
    )
