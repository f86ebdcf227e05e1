from __future__ import annotations

from typing import Any

import pytest

from sglite.errors import InvalidGrammar, UnsupportedSchema
from sglite.grammar import spec
from sglite.grammar.engines import route
from tests.grammar.helpers import whole

ARGS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8, "pattern": "^[A-Z]"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
SCHEMA = {"type": "json_schema", "json_schema": ARGS}


def tag(content: dict[str, Any], begin: str = "<f=w>", end: Any = "</f>") -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def structural(format: dict[str, Any]):
    return spec.structural_tag({"type": "structural_tag", "format": format})


TRIGGERED = {
    "type": "triggered_tags",
    "triggers": ["<f="],
    "tags": [tag(SCHEMA), tag({"type": "const_string", "value": "x"}, begin="<f=x>")],
}


@pytest.mark.parametrize(
    ("format", "good", "bad"),
    [
        (tag(SCHEMA), ['<f=w>{"city":"Rome"}</f>'], ['<f=w>{"city":"rome"}</f>', '<f=w>{"city":"Rome"}', ""]),
        (tag({"type": "any_text"}), ["<f=w>a < b </g></f>", "<f=w></f>"], ["<f=w>a</f>b", "<f=w>a"]),
        (tag({"type": "any_text"}, end=["!", "?"]), ["<f=w>hm?", "<f=w>a!"], ["<f=w>a!?", "<f=w>a"]),
        (
            TRIGGERED,
            ["", "free text", 'so <f=w>{"city":"Rome"}</f> and <f=x>x</f>.', "<f=x>x</f>", "a<b, f=1"],
            ["<f=", "<f=y>", '<f=w>{"city":1}</f>', "text <f=x>y</f>"],
        ),
        ({**TRIGGERED, "at_least_one": True}, ["so <f=x>x</f>", "<f=x>x</f><f=x>x</f>"], ["", "free text"]),
        ({**TRIGGERED, "stop_after_first": True}, ["<f=x>x</f>", ""], ["<f=x>x</f> more"]),
        (
            {"type": "or", "elements": [SCHEMA, {"type": "regex", "pattern": "no/[0-9]+"}]},
            ['{"city":"Rome","days":3}', "no/12"],
            ["no/", "{}", "no"],
        ),
        (
            {
                "type": "sequence",
                "elements": [{"type": "const_string", "value": 'a "b"\n'}, {"type": "star", "content": SCHEMA}],
            },
            ['a "b"\n', 'a "b"\n{"city":"A"}{"city":"B"}'],
            ['a "b"', 'a "b"\n{"city":"a"}'],
        ),
    ],
)
def test_structural_tags_are_exact(byte_compiler, format, good, bad):
    wanted = structural(format)
    assert byte_compiler.compile_now(wanted).coverage.engine == "llguidance"
    for text in good:
        assert whole(byte_compiler, wanted, text), text
    for text in bad:
        assert not whole(byte_compiler, wanted, text), text


def test_a_schema_in_a_tag_is_refused_where_it_cannot_be_exact():
    with pytest.raises(UnsupportedSchema) as caught:
        route.plan(structural(tag({"type": "json_schema", "json_schema": {"$ref": "https://example.com"}})))
    assert caught.value.pointer == "/format/content/json_schema/$ref"
    with pytest.raises(InvalidGrammar, match="beside a JSON schema"):
        route.plan(structural(tag({**SCHEMA, "style": "qwen_xml"})))


def test_what_lark_cannot_express_goes_to_xgrammar_where_no_schema_is_in_it():
    plan = route.plan(structural({"type": "any_text", "excludes": ["x"]}))
    assert plan.engine == "xgrammar"


def test_coverage_names_the_keywords_inside(byte_compiler):
    items = byte_compiler.compile_now(structural(tag(SCHEMA))).coverage.items
    assert "/format/content/json_schema/properties/city/maxLength" in {item.pointer for item in items}


@pytest.mark.parametrize(
    "format", [{"type": "or"}, {"type": "sequence", "elements": [3]}, {"type": "tag", "begin": "a"}]
)
def test_what_is_no_tag_is_refused(format):
    with pytest.raises(InvalidGrammar):
        byte = structural({"type": "sequence", "elements": [SCHEMA, format]})
        route.plan(byte)


OPEN = {"type": "json_schema", "json_schema": {"type": "object", "properties": {"a": {"uniqueItems": True}}}}


@pytest.mark.parametrize(
    ("format", "good", "bad"),
    [
        (tag(OPEN), '<f=w>{"b":1,"c":{"b":1}}</f>', '<f=w>{"b":1,"b":1}</f>'),
        ({**TRIGGERED, "tags": [tag(OPEN)]}, 'a {"b":1,"b":1} <f=w>{"b":1}</f>', 'a <f=w>{"b":1,"b":1}</f>'),
        ({**TRIGGERED, "tags": [tag(OPEN)]}, "<f=w>{}</f><f=w>{}</f>", '<f=w>{}</f><f=w>{"b":1,"b":1}</f>'),
        ({"type": "plus", "content": tag(OPEN)}, '<f=w>{"a":[1,2]}</f>', '<f=w>{"a":[1,2,1]}</f>'),
    ],
)
def test_no_key_stands_twice_within_a_tag(byte_compiler, format, good, bad):
    assert whole(byte_compiler, structural(format), good)
    assert not whole(byte_compiler, structural(format), bad)


def test_where_a_tag_cannot_be_told_from_text_the_coverage_says_so():
    closed = {"type": "json_schema", "json_schema": {"type": "object", "properties": {"a": {}}}}
    elements = [tag(closed), {"type": "regex", "pattern": ".*"}]
    coverage = route.plan(structural({"type": "sequence", "elements": elements})).coverage
    assert [item.keyword for item in coverage.items if item.status == "unsupported"] == ["additionalProperties"]
    with pytest.raises(UnsupportedSchema) as caught:
        route.plan(structural({"type": "sequence", "elements": [tag(OPEN), {"type": "regex", "pattern": ".*"}]}))
    assert caught.value.keyword == "uniqueItems"
