"""What a chat template writes before and after each message, so that a chat can be built up piece by piece.

The template is rendered with a mark as the content of every message, and the text around the last mark is read off:

    render([system: M0, user: M1])     = ...M0 <|im_end|>\\n<|im_start|>user\\n M1 <|im_end|>\\n
                                             ~~suffix 0~~~~~~~~~prefix 1~~~~~~    ~~suffix 1~~

A system message that the template adds by itself is part of the first prefix. The prefix of an assistant's message is
the template's generation prompt, so that what the model writes follows what it was trained to follow. A model without
a chat template gets plain `USER:` lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sglite.errors import InvalidRequest
from sglite.lang.client import Client, takes_chats
from sglite.text.types import TextTokenizer

_MAX_CACHED = 4096


class Roles(Protocol):
    def around(self, roles: tuple[str, ...]) -> tuple[str, str]:
        """(prefix, suffix) of the last message of a chat whose messages have these roles. Raises InvalidRequest."""
        ...


class PlainRoles:
    """For models and clients without a chat template."""

    def around(self, roles: tuple[str, ...]) -> tuple[str, str]:
        return f"{roles[-1].upper()}:", "\n"


class TemplateRoles:
    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[tuple[str, ...], tuple[str, str]] = {}

    def around(self, roles: tuple[str, ...]) -> tuple[str, str]:
        found = self._known.get(roles)
        if found is None:
            found = self._find(roles)
            if len(self._known) >= _MAX_CACHED:
                self._known.clear()
            self._known[roles] = found
        return found

    def _find(self, roles: tuple[str, ...]) -> tuple[str, str]:
        *earlier, role = roles
        text = self._render(roles, generate=False)
        start = self._position(text, len(earlier), roles)
        suffix = text[start + len(_mark(len(earlier))) :]
        head = text[:start]
        if role == "assistant" and earlier:
            head = self._render(earlier, generate=True)
        if not earlier:
            return head, suffix
        last = len(earlier) - 1
        between = head[self._position(head, last, roles) + len(_mark(last)) :]
        written = self.around(tuple(earlier))[1]
        if not between.startswith(written):
            raise InvalidRequest(
                f"the model's chat template rewrites a {earlier[-1]} message when a {role} message follows, so this "
                "chat cannot be built up step by step",
                param="messages",
            )
        return between[len(written) :], suffix

    def _render(self, roles: Sequence[str], *, generate: bool) -> str:
        messages = [{"role": role, "content": _mark(i)} for i, role in enumerate(roles)]
        return self._tokenizer.render_chat(messages, add_generation_prompt=generate)

    @staticmethod
    def _position(text: str, index: int, roles: tuple[str, ...]) -> int:
        position = text.rfind(_mark(index))
        if position < 0:
            raise InvalidRequest(
                f"the model's chat template leaves out a {roles[index]} message that stands here; "
                "put its text into the first user message",
                param="messages",
            )
        return position


def _mark(index: int) -> str:
    return f"sglite{index}content"


class UnknownRoles:
    """For a model whose chat template is out of reach."""

    def around(self, roles: tuple[str, ...]) -> tuple[str, str]:
        raise InvalidRequest(
            "chat roles need the model's chat template: give RuntimeEndpoint(tokenizer=FOLDER of the model)"
        )


def roles_of(tokenizer: TextTokenizer) -> Roles:
    return TemplateRoles(tokenizer) if tokenizer.has_chat_template else PlainRoles()


def roles_without_tokenizer(client: Client) -> Roles:
    """A chat API is given messages, so what stands between them is only for people to read."""
    if takes_chats(client) or not client.model_info.has_chat_template:
        return PlainRoles()
    return UnknownRoles()
