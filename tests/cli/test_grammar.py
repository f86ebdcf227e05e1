from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglite import cli

SCHEMA = {
    "type": "object",
    "properties": {"z": {"type": "number"}, "a": {"type": "string"}},
    "required": ["z"],
}


@pytest.fixture
def write(tmp_path: Path):
    def write(name: str, content: Any) -> str:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        return str(path)

    return write


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(["grammar", *arguments])
    return int(ended.value.code or 0), capsys.readouterr().out


def lines(text: str) -> list[Any]:
    return [json.loads(line) for line in text.splitlines()]


def test_each_instance_gets_one_line(write, capsys):
    schema = write("s.json", SCHEMA)
    good = write("good.json", b' { "z" : 1.50 , "a" : "\xc3\xa9\\u00e9\\n" }\n')
    bad = write("bad.json", {"z": "1"})
    out_of_order = write("order.json", {"a": "x", "z": 1})
    broken = write("broken.json", b"{")
    status, out = run(capsys, "check", "--schema", schema, good, bad, out_of_order, broken)
    assert status == 0
    found = lines(out)
    assert [line["instance"] for line in found] == [good, bad, out_of_order, broken]
    assert [line["accepted"] for line in found] == [True, False, False, False]
    assert found[0] == {"instance": good, "accepted": True}


def test_reorder_puts_keys_into_schema_order(write, capsys):
    schema = write("s.json", SCHEMA)
    out_of_order = write("order.json", b'{"extra":null,"a":"x","z":1}')
    assert lines(run(capsys, "check", "--schema", schema, out_of_order)[1])[0]["accepted"] is False
    assert lines(run(capsys, "check", "--schema", schema, "--reorder", out_of_order)[1])[0]["accepted"] is True


def test_raw_feeds_the_bytes_as_they_are(write, capsys):
    schema = write("s.json", SCHEMA)
    spaced, exact = write("spaced.json", b'{"z": 1}'), write("exact.json", b'{"z":1}')
    status, out = run(capsys, "check", "--schema", schema, "--raw", spaced, exact)
    assert status == 0
    assert [line["accepted"] for line in lines(out)] == [False, True]
    assert run(capsys, "check", "--schema", schema, "--raw", "--reorder", exact)[0] == 1


def test_a_number_is_fed_as_it_is_written(write, capsys):
    schema = write("s.json", {"type": "number"})
    names = [write(f"{i}.json", text) for i, text in enumerate((b"1e3", b"1.50", b"123456789012345678901234567890"))]
    assert all(line["accepted"] for line in lines(run(capsys, "check", "--schema", schema, *names)[1]))


def test_a_refused_schema_names_keyword_and_pointer(write, capsys):
    schema = write("s.json", {"type": "object", "properties": {"x": {"$ref": "https://example.com/other.json"}}})
    for command in (("check", "--schema", schema, write("i.json", {})), ("explain", "--schema", schema)):
        status, out = run(capsys, *command)
        error = lines(out)[0]["error"]
        assert status == 2
        assert error["keyword"] == "$ref"
        assert error["pointer"] == "/properties/x/$ref"


def test_a_misspelled_type_is_named_with_its_place_and_the_types_that_there_are(write, capsys):
    schema = write("s.json", {"type": "object", "properties": {"x": {"type": "objct"}}})
    status, out = run(capsys, "explain", "--schema", schema)
    error = lines(out)[0]["error"]
    assert status == 2
    assert (error["pointer"], error["keyword"]) == ("/properties/x/type", "type")
    assert "'objct'" in error["message"]
    assert "array, object" in error["message"]


@pytest.mark.parametrize("text", [b"{", b"[1]", b'{"type": 3}'])
def test_what_is_no_schema_is_refused_too(write, capsys, text):
    status, out = run(capsys, "check", "--schema", write("s.json", text), write("i.json", {}))
    assert status == 2
    assert "error" in lines(out)[0]


def test_explain_shows_every_keyword_and_the_engine(write, capsys):
    schema = write("s.json", SCHEMA)
    status, out = run(capsys, "explain", "--schema", schema)
    assert status == 0
    assert "/properties/z/type" in out
    assert "llguidance" in out
    status, out = run(capsys, "explain", "--schema", schema, "--json")
    assert lines(out)[0]["exact"] is True


def test_a_missing_file_is_an_error(write, capsys):
    assert run(capsys, "check", "--schema", "/nowhere.json", "x.json")[0] == 1
    assert run(capsys, "check", "--schema", write("s.json", {}), "/nowhere.json")[0] == 1


def test_json_in_the_place_of_a_file_is_told_where_it_goes(write, capsys):
    with pytest.raises(SystemExit):
        cli.main(["grammar", "check", "--schema", write("s.json", SCHEMA), '{"z": 1}'])
    assert "give a file, or - and the JSON on standard input" in capsys.readouterr().err
