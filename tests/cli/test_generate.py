"""The arguments of `sglite generate` and `sglite run`, without a model."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

import sglite as sgl
from sglite import cli
from sglite.protocol import FinishReason, RequestOutput
from tests.fakes.client import ScriptedClient
from tests.fakes.tokenizer import ByteTokenizer


class FakeEngine:
    """What the commands use of an Engine."""

    calls: list[Any] = []
    options: dict[str, Any] = {}
    finish = FinishReason.STOP

    def __init__(self, **options: Any) -> None:
        FakeEngine.options = options
        self.tokenizer = ByteTokenizer()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def generate(self, prompt: Any, sampling: Any, *, constraint: Any) -> RequestOutput:
        FakeEngine.calls.append((prompt, sampling, constraint))
        return RequestOutput(request_id="r", text="the answer", finish_reason=self.finish)

    def stream(self, prompt: Any, sampling: Any, *, constraint: Any) -> Any:
        yield RequestOutput(request_id="r", text="the ")
        yield self.generate(prompt, sampling, constraint=constraint)


@pytest.fixture(autouse=True)
def fake_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sgl, "Engine", FakeEngine, raising=False)
    FakeEngine.calls = []
    FakeEngine.finish = FinishReason.STOP


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    return int(ended.value.code or 0)


def test_a_prompt_is_completed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", "Once", "--max-tokens", "7", "--stop", "a", "--stop", "b") == 0
    assert capsys.readouterr().out == "the answer\n"
    ((prompt, sampling, constraint),) = FakeEngine.calls
    assert (prompt, constraint) == ("Once", None)
    assert (sampling.max_tokens, sampling.stop) == (7, ("a", "b"))


@pytest.mark.parametrize("command", [["generate", "Once"], ["chat"]])
def test_the_number_of_threads_reaches_the_engine(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert run(*command, "--num-threads", "3") == 0
    assert FakeEngine.options["num_threads"] == 3


def test_it_streams_and_chats(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", "Once", "--stream", "--chat") == 0
    assert capsys.readouterr().out == "the the answer\n"
    assert bytes(FakeEngine.calls[0][0]) == b"<user>Once</user>\n<assistant>"


def test_constraints(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps({"type": "object"}))
    assert run("generate", "x", "--schema", str(file)) == 0
    assert run("generate", "x", "--regex", "[0-9]+") == 0
    assert run("generate", "x", "--choices", "yes, no") == 0
    assert [call[2].kind for call in FakeEngine.calls] == ["json_schema", "regex", "choice"]
    assert json.loads(FakeEngine.calls[2][2].source) == ["yes", "no"]


def test_mistakes_are_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", "x", "--regex", "a", "--choices", "b") == 1
    assert run("generate", "x", "--schema", str(tmp_path / "missing.json")) == 1
    assert run("generate", "x", "--regex", "[a") == 1
    assert run("run", str(tmp_path / "missing.py")) == 1
    assert len(capsys.readouterr().err.strip().splitlines()) == 4


def test_a_schema_that_is_no_text_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "schema.json"
    file.write_bytes(b'{"const": "\xff"}')
    for command in (["generate", "x"], ["grammar", "explain"]):
        assert run(*command, "--schema", str(file)) != 0
        assert "is not UTF-8" in capsys.readouterr().err


def test_a_constrained_answer_that_is_cut_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    FakeEngine.finish = FinishReason.LENGTH
    assert run("generate", "x", "--regex", "a+") == 3
    assert "raise --max-tokens" in capsys.readouterr().err


class ScriptedEngine(ScriptedClient):
    def __init__(self, **options: Any) -> None:
        super().__init__()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        sgl.set_default_backend(None)


@pytest.fixture
def program_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sgl, "Engine", ScriptedEngine, raising=False)
    file = tmp_path / "program.py"
    file.write_text(
        "import sys\nimport sglite as sgl\n"
        "@sgl.function\ndef f(s):\n    s += 'a' + sgl.gen('x')\n"
        "if __name__ == '__main__':\n    print(f.run()['x'], sys.argv[1:])\n"
    )
    return str(file)


def test_a_program_file_runs_on_the_model(program_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("run", program_file, "--depth", "3") == 0
    assert capsys.readouterr().out == "answer 1 ['--depth', '3']\n"


def test_a_program_file_is_traced(program_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run.json"
    assert run("trace", program_file, "--out", str(out)) == 0
    assert "timeline of 1 run:" in capsys.readouterr().err
    assert json.loads(out.read_text())["name"] == "f"


@pytest.mark.parametrize("command", ["run", "trace"])
def test_an_error_of_the_users_file_is_shown_without_our_frames(
    command: str, program_file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(Path(program_file).parent)  # where trace writes
    Path(program_file).write_text(
        "import sglite as sgl\n@sgl.function\ndef f(s):\n    s += 'a'\n    s['x'] = 1 / 0\n\n"
        "def main():\n    f.run()\n\nmain()\n"
    )
    assert run(command, program_file) == 1
    said = capsys.readouterr().err
    assert "s['x'] = 1 / 0" in said
    assert "line 8, in main\n    f.run()" in said
    assert "ProgramError: program f, step 0: ZeroDivisionError: division by zero" in said
    assert not any(hidden in said for hidden in ("typer", "runpy", "sglite/cli", "sglite/lang"))


def test_an_error_of_a_call_ends_with_the_line_of_the_call(
    program_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(program_file).write_text("import sglite as sgl\n\nsgl.gen('x', schema=3)\n")
    assert run("run", program_file) == 1
    frames = [line for line in capsys.readouterr().err.splitlines() if line.startswith("  File")]
    assert frames == [f'  File "{program_file}", line 3, in <module>']


def test_a_file_that_is_not_python_is_told_before_a_model_is_loaded(
    program_file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sgl, "Engine", None)
    Path(program_file).write_text("def f(:\n")
    assert run("run", program_file) == 1
    said = capsys.readouterr().err
    assert said.startswith(f'  File "{program_file}", line 1')
    assert said.endswith("SyntaxError: invalid syntax\n")


def test_a_file_may_end_with_a_status_of_its_own(program_file: str) -> None:
    Path(program_file).write_text("import sys\nsys.exit(7)\n")
    assert run("run", program_file) == 7
