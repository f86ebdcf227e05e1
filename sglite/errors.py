"""Every error that sglite raises on purpose, as one tree.

    SgliteError
    ├── InvalidRequest (400)            a parameter, prompt or combination that cannot work
    │   ├── PromptTooLong
    │   ├── GrammarError                a constraint that is refused before a token is spent
    │   │   ├── InvalidGrammar          the text is not a schema / regex / grammar at all
    │   │   ├── UnsupportedSchema       a keyword that cannot be enforced exactly (pointer, keyword, reason)
    │   │   └── GrammarTooLarge         over a size, depth, node, time-independent or memory limit
    │   └── ProgramSyntaxError          misuse of the DSL, found at the call
    ├── GrammarTimeout (503)            the compile ran out of time: retryable, never cached as invalid
    ├── IncompleteOutput (422)          a value that its token limit cut off
    ├── GrammarViolation (500)          a sampled token that the matcher refused, or an empty mask
    ├── ModelError (400)
    │   ├── ModelNotFound (404)
    │   └── UnsupportedModel
    ├── Overloaded (429 / 503)          carries retry_after
    ├── RequestAborted (499)
    ├── OutOfPages (507)                one request needs more KV pages than there are
    ├── EngineDead (503)
    ├── BackendError (502)              a remote endpoint answered something else than an answer
    └── ProgramError                    wraps what a program raised: program index, step, variable

User mistakes raise from this tree; broken invariants assert. Texts say what to do next.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_MAX_NAME = 64  # comparing names takes the square of their length, and a request may bring any


class SgliteError(Exception):
    """Root. `status` is the HTTP status, `code` the machine-readable reason, `param` the field at fault.
    `variable` is the one that a program's operation at fault was to set."""

    status: int = 500
    code: str = "internal_error"
    variable: str | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequest(SgliteError, ValueError):
    status = 400
    code = "invalid_request"


class PromptTooLong(InvalidRequest):
    code = "context_length_exceeded"


class GrammarError(InvalidRequest):
    code = "invalid_grammar"


class InvalidGrammar(GrammarError):
    """The constraint's text cannot be parsed. `pointer` and `keyword`: where in a schema, if known."""

    def __init__(
        self, message: str, *, param: str | None = None, pointer: str | None = None, keyword: str | None = None
    ) -> None:
        super().__init__(message, param=param)
        self.pointer = pointer
        self.keyword = keyword


class UnsupportedSchema(GrammarError):
    """A keyword that cannot be enforced exactly.

    `pointer` is a JSON pointer into the schema as given ("" is the root), `keyword` its name.
    """

    code = "unsupported_schema"

    def __init__(self, reason: str, *, pointer: str, keyword: str) -> None:
        super().__init__(f"schema keyword {keyword!r} at {pointer or '/'} cannot be enforced: {reason}")
        self.pointer = pointer
        self.keyword = keyword
        self.reason = reason


class GrammarTooLarge(GrammarError):
    code = "grammar_too_large"


class ProgramSyntaxError(InvalidRequest):
    code = "invalid_program"


class GrammarTimeout(SgliteError):
    status = 503
    code = "grammar_timeout"


class GrammarViolation(SgliteError):
    code = "grammar_violation"


class IncompleteOutput(SgliteError):
    """The output reached its limit of tokens before its value was complete."""

    status = 422
    code = "incomplete_output"


class ModelError(SgliteError):
    status = 400
    code = "model_error"


class ModelNotFound(ModelError):
    status = 404
    code = "model_not_found"


class UnsupportedModel(ModelError):
    code = "unsupported_model"


class Overloaded(SgliteError):
    """`retry_after` is in seconds."""

    status = 429
    code = "overloaded"

    def __init__(self, message: str, *, retry_after: float = 1.0, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.retry_after = retry_after


class RequestAborted(SgliteError):
    status = 499
    code = "aborted"


class OutOfPages(SgliteError):
    status = 507
    code = "out_of_kv_memory"


class EngineDead(SgliteError):
    status = 503
    code = "engine_dead"


class BackendError(SgliteError):
    status = 502
    code = "backend_error"


class ProgramError(SgliteError):
    """What a program raised, with where. The original exception is `__cause__`.

    `program` is the index in a batch (None for a single run), `step` the number of the operation
    within the program, `variable` the variable it was to set (None where it sets none).
    """

    code = "program_error"

    def __init__(
        self, message: str, *, program: int | None = None, step: int | None = None, variable: str | None = None
    ) -> None:
        super().__init__(message)
        self.program = program
        self.step = step
        self.variable = variable
        self.run: str | None = (
            None  # the run that it was raised in: programs call programs, and each batch counts from 0
        )


def error_types() -> dict[str, type[SgliteError]]:
    """Class name -> class, for rebuilding an error that crossed a process or a network."""
    found: dict[str, type[SgliteError]] = {}
    stack: list[type[SgliteError]] = [SgliteError]
    while stack:
        cls = stack.pop()
        found[cls.__name__] = cls
        stack.extend(cls.__subclasses__())
    return found


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """The end of a message about a name that is not known: a question, or nothing where no known one is like it."""
    text = str(name)
    close = difflib.get_close_matches(text, sorted(known), n=2) if len(text) <= _MAX_NAME else []
    return f"did you mean {' or '.join(close)}?" if close else ""
