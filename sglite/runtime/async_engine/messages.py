"""What a front (callers) and a back (the step loop) say to each other: frozen msgspec structs.

A thread hands them over as they are; a process sends them as msgpack, one list of structs a frame. Nothing is
ever pickled: a frame that does not decode to one of these types is an error, never an object.
"""

from __future__ import annotations

from typing import Any

import msgspec

from sglite.protocol import ErrorInfo, GenerateRequest, GrammarSpec, ModelInfo, RequestOutput, ScoreOutput, ScoreRequest


class Generate(msgspec.Struct, frozen=True, tag="generate"):
    request: GenerateRequest


class Score(msgspec.Struct, frozen=True, tag="score"):
    request: ScoreRequest


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    request_id: str


class Release(msgspec.Struct, frozen=True, tag="release"):
    request_id: str


class EndProgram(msgspec.Struct, frozen=True, tag="end_program"):
    program_id: str


class CompileGrammar(msgspec.Struct, frozen=True, tag="compile_grammar"):
    call_id: int
    spec: GrammarSpec


class WarmPrefix(msgspec.Struct, frozen=True, tag="warm_prefix"):
    """Answered like a request, by one finished output."""

    request_id: str
    token_ids: tuple[int, ...]
    namespace: str
    lease_s: float


class FlushCache(msgspec.Struct, frozen=True, tag="flush_cache"):
    call_id: int


class Stats(msgspec.Struct, frozen=True, tag="stats"):
    call_id: int


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """End the loop now; what still runs is aborted."""


Command = Generate | Score | Abort | Release | EndProgram | CompileGrammar | WarmPrefix | FlushCache | Stats | Stop


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    """Everything one turn of the loop produced."""

    generated: tuple[RequestOutput, ...] = ()
    scored: tuple[ScoreOutput, ...] = ()


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """A request that was not taken in: nothing else comes for it."""

    request_id: str
    error: ErrorInfo


class Reply(msgspec.Struct, frozen=True, tag="reply"):
    """The answer to the command with this `call_id`: a value in plain builtins, or an error."""

    call_id: int
    value: Any = None
    error: ErrorInfo | None = None


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The model is loaded and the loop takes commands."""

    model_info: ModelInfo
    facts: dict[str, Any] = {}


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """Something to show while the model loads."""

    text: str


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """The process is there; `turns`: how many turns its loop has made, `busy`: whether one is being made now."""

    turns: int
    busy: bool


class Died(msgspec.Struct, frozen=True, tag="died"):
    """The loop cannot go on."""

    error: ErrorInfo


Event = Outputs | Refused | Reply | Ready | Progress | Heartbeat | Died

_encoder = msgspec.msgpack.Encoder()
_command_decoder = msgspec.msgpack.Decoder(list[Command])
_event_decoder = msgspec.msgpack.Decoder(list[Event])


def encode(messages: list[Command] | list[Event]) -> bytes:
    return _encoder.encode(messages)


def decode_commands(frame: bytes) -> list[Command]:
    return _command_decoder.decode(frame)


def decode_events(frame: bytes) -> list[Event]:
    return _event_decoder.decode(frame)
