"""`sglite generate`: one completion on the terminal."""

from __future__ import annotations

import sys
from typing import Any

import typer

import sglite
from sglite.cli.files import read_text
from sglite.errors import InvalidRequest
from sglite.protocol import GrammarSpec, RequestOutput, SamplingParams


def command(
    prompt: str = typer.Argument(..., help="The text to complete; '-' is standard input."),
    schema: str | None = typer.Option(None, "--schema", help="File with a JSON schema that the answer satisfies."),
    regex: str | None = typer.Option(None, "--regex", help="The whole answer matches this."),
    choices: str | None = typer.Option(None, "--choices", help="The answer is one of these: a,b,c."),
    max_tokens: int = typer.Option(128, "--max-tokens", help="Longest answer, in tokens."),
    temperature: float | None = typer.Option(None, "--temperature", help="0 takes the likeliest token each time."),
    seed: int | None = typer.Option(None, "--seed", help="The same seed gives the same answer."),
    stop: list[str] = typer.Option([], "--stop", help="End before this text; may be given several times."),
    chat: bool = typer.Option(False, "--chat", help="Send the prompt as a user's message of the model's chat."),
    stream: bool = typer.Option(False, "--stream", help="Print the answer as it comes."),
    model: str = typer.Option("smollm2", "--model", help="A known name, a folder, a GGUF file or a hub id."),
    device: str = typer.Option("auto", "--device", help="'cpu', 'cuda' or 'auto'."),
    num_threads: int | None = typer.Option(
        None, "--num-threads", min=1, help="CPU threads; by default what the control group allows."
    ),
) -> None:
    """Complete a prompt, under a schema, a regex or a list of choices where one is given."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed, stop=tuple(stop))
    constraint = _constraint(schema, regex, choices)
    text = sys.stdin.read() if prompt == "-" else prompt
    with sglite.Engine(model=model, device=device, num_threads=num_threads) as engine:
        if chat:
            ids: Any = tuple(engine.tokenizer.encode(engine.tokenizer.render_chat([{"role": "user", "content": text}])))
        else:
            ids = text
        last: RequestOutput | None = None
        if stream:
            for last in engine.stream(ids, sampling, constraint=constraint):
                print(last.text, end="", flush=True)
            print()
        else:
            whole: RequestOutput = engine.generate(ids, sampling, constraint=constraint)
            print(whole.text)
            last = whole
    if constraint is not None and last is not None and last.finish_reason == "length":
        print(f"sglite: the answer is cut at {max_tokens} tokens; raise --max-tokens", file=sys.stderr)
        raise typer.Exit(3)


def _constraint(schema: str | None, regex: str | None, choices: str | None) -> GrammarSpec | None:
    given = [name for name, value in (("schema", schema), ("regex", regex), ("choices", choices)) if value is not None]
    if len(given) > 1:
        raise InvalidRequest(f"--{given[0]} and --{given[1]} exclude each other")
    if not given:
        return None
    from sglite.grammar import spec  # the grammar engines take a moment to load

    if schema is not None:
        return spec.json_schema(read_text(schema))
    if regex is not None:
        return spec.regex(regex)
    assert choices is not None
    return spec.choice(part.strip() for part in choices.split(","))
