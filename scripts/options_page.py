"""Writes docs/options.md from the fields of the configuration classes; with --check, says whether it is up to date."""

from __future__ import annotations

import dataclasses
import sys
import typing
from pathlib import Path
from typing import Any

from sglite.runtime.config import EngineConfig
from sglite.runtime.server.config import Limits, ServerConfig

PAGE = Path(__file__).parent.parent / "docs" / "options.md"

HEAD = """# Options

Made from the code by `python scripts/options_page.py`. On the command line a field `max_rows` is `--max-rows`
(`api_keys` is `--api-key`, given once for each key); in Python it is a keyword:
`sglite.Engine(model="smollm2", max_rows=64)`.
"""


def page() -> str:
    sections = (
        ("The engine", "`sglite serve`, `sglite batch` and `sglite.Engine`.", EngineConfig),
        ("The server", "`sglite serve`.", ServerConfig),
        ("Limits of one request", "`sglite serve`. Over a limit is an error 400 (413 for the body).", Limits),
    )
    return HEAD + "".join(f"\n## {title}\n\n{text}\n\n{_table(config)}" for title, text, config in sections)


def _table(config: type) -> str:
    hints = typing.get_type_hints(config)
    rows = ["| option | default | meaning |", "| --- | --- | --- |"]
    for field in dataclasses.fields(config):
        if "help" in field.metadata:
            rows.append(f"| `{field.name}` | {_default(field)} | {_meaning(field, hints[field.name])} |")
    return "\n".join(rows) + "\n"


def _default(field: dataclasses.Field[Any]) -> str:
    return "" if field.default in (None, (), "") else f"`{field.default}`"


def _meaning(field: dataclasses.Field[Any], kind: Any) -> str:
    text = str(field.metadata["help"]).replace("|", "\\|")
    choices = field.metadata.get("choices") or ()
    return f"{text} One of {', '.join(f'`{c}`' for c in choices)}." if choices else text


def main() -> int:
    if "--check" in sys.argv:
        if PAGE.read_text(encoding="utf-8") != page():
            print("docs/options.md is out of date: run python scripts/options_page.py", file=sys.stderr)
            return 1
        return 0
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
