from __future__ import annotations

import time
from typing import Any

import pytest

from sglite.errors import InvalidRequest, UnsupportedModel
from sglite.text.chat import ChatTemplate

MESSAGES = [{"role": "user", "content": "hé <b>"}, {"role": "assistant", "content": "ok"}]


def render(source: str, **variables: Any) -> str:
    template = ChatTemplate({"default": source}, max_seconds=0.2)
    return template.render(MESSAGES, add_generation_prompt=True, variables=variables)


def test_what_chat_templates_use_is_there() -> None:
    source = """
    {%- for m in messages -%}
      {%- if loop.first %}{{ bos_token }}{% endif -%}
      {%- if m.role == 'skip' %}{% continue %}{% endif -%}
      {% generation %}{{ m['content'] | tojson }}{% endgeneration %}{{ ',' if not loop.last }}
    {%- endfor -%}
    {% set ns = namespace(n=0) %}
    {%- for i in range(3) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n ~ '/' ~ loop_count }}
    {%- if add_generation_prompt %}!{% endif %}{{ ['a', 'b'] | join('-') }}{{ strftime_now('%Y') | length }}"""
    assert render(source, bos_token="<s>", loop_count=3) == '<s>"hé <b>","ok"3/3!a-b4'


def test_a_template_may_refuse_messages() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_an_error_of_the_template_is_the_requests_error() -> None:
    with pytest.raises(InvalidRequest, match="cannot render"):
        render("{{ messages[0].content + 1 }}")


@pytest.mark.parametrize("name", ["messages", "tools", "chat_template"])
def test_a_request_cannot_bring_its_own_template_or_messages(name: str) -> None:
    with pytest.raises(InvalidRequest, match=name):
        render("x", **{name: "y"})


def test_a_broken_template_is_an_unsupported_model() -> None:
    with pytest.raises(UnsupportedModel, match="not valid Jinja2"):
        ChatTemplate({"default": "{% for %}"})


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages[0].__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__.keys() }}",
        "{{ ('' | attr('__class__')).__mro__ }}",
        "{% set n = namespace() %}{{ n.__class__.__init__.__globals__.keys() }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(InvalidRequest):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) %}xxxxxxxxxxxxxxxxxxxxxxxxxx{% endfor %}{% endfor %}",
        "{% set x = 'a' * 10 ** 10 %}",
        "{% set n = namespace(s='aa') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        "{% set n = namespace(s='aa') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
        "{% set n = namespace(s=[1]) %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
        "{% set n = namespace(s='aa') %}{% for i in range(60) %}{% set n.s = n.s.replace('a', n.s) %}{% endfor %}",
        "{% set n = namespace(s='aa') %}{% for i in range(60) %}{% set n.s = n.s | replace('a', n.s) %}{% endfor %}",
        "{% set n = namespace(s='aa') %}{% for i in range(60) %}{% set n.s = [n.s, n.s] | join %}{% endfor %}",
        "{{ 'a'.ljust(10 ** 10) }}",
        "{{ '%99999999999d' % 1 }}",
        "{{ '{:99999999999}'.format(1) }}",
        "{{ '%99999999999d' | format(1) }}",
        "{% set n = namespace(s=9) %}{% for i in range(60) %}{% set n.s = n.s ** n.s %}{% endfor %}",
        "{% set n = namespace(s=9) %}{% for i in range(60) %}{% set n.s = n.s * n.s %}{% endfor %}",
        "{% macro f(x) %}{{ f(x) }}{{ f(x) }}{% endmacro %}{{ f(1) }}",
        "{{ messages | tojson(indent=99999999) }}",
    ],
)
def test_a_costly_template_ends_soon(source: str) -> None:
    began = time.monotonic()
    with pytest.raises((InvalidRequest, UnsupportedModel)):
        render(source)
    assert time.monotonic() - began < 2
