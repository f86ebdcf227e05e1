"""sglite: a runtime for LLM programs with structured output.

Every public name is here and is imported when it is first used, so `import sglite` is instant and loads no torch.
Type checkers read the same names in __init__.pyi; a test holds the two together.
"""

from __future__ import annotations

import importlib
from typing import Any

from sglite._version import __version__

_ERRORS = (
    "BackendError",
    "EngineDead",
    "GrammarError",
    "GrammarTimeout",
    "GrammarTooLarge",
    "GrammarViolation",
    "IncompleteOutput",
    "InvalidGrammar",
    "InvalidRequest",
    "ModelError",
    "ModelNotFound",
    "OutOfPages",
    "Overloaded",
    "ProgramError",
    "ProgramSyntaxError",
    "PromptTooLong",
    "RequestAborted",
    "SgliteError",
    "UnsupportedModel",
    "UnsupportedSchema",
)
_PROTOCOL = ("FinishReason", "GrammarSpec", "RequestOutput", "SamplingParams", "Usage")
_LANG = (
    "assistant",
    "assistant_begin",
    "assistant_end",
    "flush_cache",
    "function",
    "gen",
    "gen_int",
    "gen_string",
    "get_server_info",
    "image",
    "select",
    "separate_reasoning",
    "set_default_backend",
    "system",
    "system_begin",
    "system_end",
    "user",
    "user_begin",
    "user_end",
    "video",
)
_CHOICES = (
    "greedy_token_selection",
    "token_length_normalized",
    "total_probability",
    "unconditional_likelihood_normalized",
)

# name -> the module that defines it
_HOMES: dict[str, str] = {
    **dict.fromkeys(_ERRORS, "sglite.errors"),
    **dict.fromkeys(_PROTOCOL, "sglite.protocol"),
    **dict.fromkeys(_LANG, "sglite.lang.api"),
    **dict.fromkeys(_CHOICES, "sglite.lang.choices"),
    "ProgramState": "sglite.lang.state",
    "global_config": "sglite.lang.config",
    "Engine": "sglite.runtime.async_engine",
    "Runtime": "sglite.lang.backends.runtime",
    "RuntimeEndpoint": "sglite.lang.backends.sglite_server",
    "OpenAI": "sglite.lang.backends.openai",
}

__all__ = ["__version__", *sorted(_HOMES)]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'sglite' has no attribute {name!r}")
    from sglite import bytecode  # with the first name: `import sglite` stays instant

    with bytecode.kept():
        value = getattr(importlib.import_module(home), name)
    globals()[name] = value  # the next look-up does not come here
    return value


def __dir__() -> list[str]:
    return __all__
