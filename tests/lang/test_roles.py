"""A chat built up piece by piece is the chat that the template renders at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from sglite.errors import InvalidRequest
from sglite.lang.roles import PlainRoles, TemplateRoles, roles_of
from sglite.text.chat import ChatTemplate
from tests.fakes.tokenizer import ByteTokenizer

CHATML = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}<|im_start|>system\nBe helpful<|im_end|>\n"
    "{% endif %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% elif m['role'] == 'assistant' %} {{ m['content'] }}</s>"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MERGING = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{% elif m['role'] == 'user' %}"
    "<user>{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}\n\n{% endif %}{{ m['content'] }}</user>"
    "{% endif %}{% endfor %}"
)
REWRITING = "{% for m in messages %}{{ m['content'] }}{% if loop.last %}<last>{% else %}<more>{% endif %}{% endfor %}"


class Templated(ByteTokenizer):
    def __init__(self, source: str) -> None:
        self._template = ChatTemplate({"default": source})
        self.rendered = 0

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_args: Any,
    ) -> str:
        self.rendered += 1
        return self._template.render(
            messages, add_generation_prompt=add_generation_prompt, variables={"bos_token": "<s>"}
        )


def built(tokenizer: Templated, messages: list[dict[str, str]]) -> str:
    roles = TemplateRoles(tokenizer)
    text = ""
    for i, message in enumerate(messages):
        prefix, suffix = roles.around(tuple(m["role"] for m in messages[: i + 1]))
        text += prefix + message["content"] + suffix
    return text


def chat(*roles: str) -> list[dict[str, str]]:
    return [{"role": role, "content": f"{role} says {i}"} for i, role in enumerate(roles)]


@pytest.mark.parametrize("template", [CHATML, LLAMA3, THINKING])
@pytest.mark.parametrize(
    "roles", [("user",), ("user", "assistant", "user"), ("user", "assistant", "user", "assistant", "user")]
)
def test_the_pieces_make_what_the_template_renders(template: str, roles: tuple[str, ...]) -> None:
    tokenizer = Templated(template)
    messages = chat(*roles)
    assert built(tokenizer, messages) == tokenizer.render_chat(messages, add_generation_prompt=False)


@pytest.mark.parametrize("template", [CHATML, LLAMA3, THINKING])
def test_an_assistants_turn_begins_with_the_generation_prompt(template: str) -> None:
    tokenizer = Templated(template)
    messages = chat("system", "user")
    prefix, _ = TemplateRoles(tokenizer).around(("system", "user", "assistant"))
    assert built(tokenizer, messages) + prefix == tokenizer.render_chat(messages, add_generation_prompt=True)


def test_a_blank_that_the_model_writes_itself_is_no_part_of_the_prefix() -> None:
    tokenizer = Templated(MISTRAL)
    messages = [*chat("user"), {"role": "assistant", "content": " generated"}, {"role": "user", "content": "next"}]
    assert built(tokenizer, messages) == "<s>[INST] user says 0 [/INST] generated</s>[INST] next [/INST]"


def test_a_default_system_message_belongs_to_the_first_prefix() -> None:
    prefix, _ = TemplateRoles(Templated(CHATML)).around(("user",))
    assert prefix.startswith("<|im_start|>system\nBe helpful<|im_end|>\n<|im_start|>user\n")
    prefix, _ = TemplateRoles(Templated(CHATML)).around(("system",))
    assert "helpful" not in prefix


def test_what_a_template_cannot_do_is_said() -> None:
    with pytest.raises(InvalidRequest, match="only user and assistant"):
        TemplateRoles(Templated(MISTRAL)).around(("system",))
    with pytest.raises(InvalidRequest, match="first user message"):
        TemplateRoles(Templated(MERGING)).around(("system",))
    with pytest.raises(InvalidRequest, match="rewrites a user message"):
        TemplateRoles(Templated(REWRITING)).around(("user", "user"))


def test_a_chat_of_known_shape_is_not_rendered_again() -> None:
    tokenizer = Templated(CHATML)
    roles = TemplateRoles(tokenizer)
    first = roles.around(("user", "assistant"))
    rendered = tokenizer.rendered
    assert roles.around(("user", "assistant")) == first
    assert tokenizer.rendered == rendered


def test_a_model_without_a_template_gets_plain_lines() -> None:
    class Bare(ByteTokenizer):
        has_chat_template = False

    assert isinstance(roles_of(Bare()), PlainRoles)
    assert PlainRoles().around(("system", "user")) == ("USER:", "\n")
