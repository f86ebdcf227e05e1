"""`sglite chat`: a conversation in the terminal.

    /reset  begin again      /system TEXT  begin again with instructions      /exit  leave (also Ctrl-D)

Ctrl-C while the model writes stops this answer; what was written stays in the conversation.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import typer

import sglite
from sglite.errors import SgliteError
from sglite.protocol import RequestOutput, SamplingParams

Ask = Callable[[], str]  # the next line of the user; raises EOFError
Show = Callable[[str], None]
Answer = Callable[[list[dict[str, str]]], Iterator[RequestOutput]]

_HELP = "/reset  begin again    /system TEXT  begin again with instructions    /exit  leave"


def command(
    system: str | None = typer.Option(None, "--system", help="Instructions for the model."),
    max_tokens: int | None = typer.Option(
        None, "--max-tokens", help="Longest answer; by default all the context holds."
    ),
    temperature: float | None = typer.Option(None, "--temperature", help="0 takes the likeliest token each time."),
    seed: int | None = typer.Option(None, "--seed", help="The same seed gives the same answers."),
    model: str = typer.Option("smollm2", "--model", help="A known name, a folder, a GGUF file or a hub id."),
    device: str = typer.Option("auto", "--device", help="'cpu', 'cuda' or 'auto'."),
    num_threads: int | None = typer.Option(
        None, "--num-threads", min=1, help="CPU threads; by default what the control group allows."
    ),
) -> None:
    """Talk with a model in the terminal."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    with sglite.Engine(model=model, device=device, num_threads=num_threads) as engine:

        def answer(messages: list[dict[str, str]]) -> Iterator[RequestOutput]:
            prompt = engine.tokenizer.encode(engine.tokenizer.render_chat(messages))
            return engine.stream(tuple(prompt), sampling)

        if sys.stdin.isatty():
            import readline  # noqa: F401  # pyright: ignore[reportUnusedImport] - gives input() a history

            print(f"{engine.model_info.name}. {_HELP}")
        converse(answer, ask=lambda: input("> "), show=_print, system=system)


def converse(answer: Answer, *, ask: Ask, show: Show, system: str | None = None) -> list[dict[str, str]]:
    """Ask and answer until the user leaves. Returns the conversation's messages."""
    messages = _begin(system)
    while True:
        try:
            line = ask().strip()
        except (EOFError, KeyboardInterrupt):
            show("\n")
            return messages
        name, _, rest = line.partition(" ")
        match name:
            case "":
                continue
            case "/exit" | "/quit":
                return messages
            case "/reset":
                messages = _begin(system)
                show("The conversation begins again.\n")
            case "/system":
                system = rest.strip() or None
                messages = _begin(system)
                show("The conversation begins again.\n")
            case _ if name.startswith("/"):
                show(f"{_HELP}\n")
            case _:
                _turn(messages, line, answer, show)


def _turn(messages: list[dict[str, str]], line: str, answer: Answer, show: Show) -> None:
    """One question and its answer. A refused one (the context is full) is taken back."""
    messages.append({"role": "user", "content": line})
    written = ""
    stopped = ""
    try:
        for output in answer(messages):
            written += output.text
            show(output.text)
    except KeyboardInterrupt:
        stopped = " [stopped]"
    except SgliteError as error:
        show(f"\n{error}\n")
        if not written:
            messages.pop()
            return
    show(f"{stopped}\n")
    messages.append({"role": "assistant", "content": written})


def _begin(system: str | None) -> list[dict[str, str]]:
    return [] if system is None else [{"role": "system", "content": system}]


def _print(text: str) -> None:
    print(text, end="", flush=True)
