from __future__ import annotations

from pathlib import Path

import pytest

from sglite.cli import main


def test_list_shows_built_in_and_cached_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SGLITE_HOME", str(tmp_path))
    other = tmp_path / "models-v1" / "other-abc"
    other.mkdir(parents=True)
    (other / "config.json").write_text("{}" + " " * 1_999_998)
    with pytest.raises(SystemExit) as ended:
        main(["model", "list"])
    assert ended.value.code == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.split()[:3] == ["smollm2", "not", "cached"]
    assert second.startswith("other-abc")
    assert "cached, 2 MB" in second
