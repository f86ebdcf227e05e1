"""Print how large the code is: lines by folder, the longest files and functions. No limit; growth is seen."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("sglite", "tests", "examples", "benchmarks", "scripts")
SHOWN = 10


def sources() -> Iterator[Path]:
    for folder in FOLDERS:
        yield from sorted((ROOT / folder).rglob("*.py"))


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[int, str]]:
    """(lines, dotted name) of every function, nested ones too."""
    for node in ast.iter_child_nodes(tree):
        name = prefix
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{prefix}.{node.name}" if prefix else node.name
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield (node.end_lineno or node.lineno) - node.lineno + 1, name
        yield from functions(node, name)


def main() -> None:
    by_folder: Counter[str] = Counter()
    files: list[tuple[int, str]] = []
    longest: list[tuple[int, str]] = []
    for path in sources():
        text = path.read_text(encoding="utf-8")
        name = str(path.relative_to(ROOT))
        lines = text.count("\n")
        folder = "/".join(name.split("/")[:-1][:3])
        by_folder[folder] += lines
        if name.startswith("sglite/"):
            files.append((lines, name))
            longest += [(size, f"{name}: {function}") for size, function in functions(ast.parse(text))]
    for folder, lines in sorted(by_folder.items()):
        print(f"{lines:7}  {folder}")
    total = sum(lines for lines, _ in files)
    print(f"{total:7}  sglite in all; {sum(by_folder.values()) - total} outside it")
    for title, rows in (("longest files", files), ("longest functions", longest)):
        print(title)
        for lines, name in sorted(rows, reverse=True)[:SHOWN]:
            print(f"{lines:7}  {name}")


if __name__ == "__main__":
    main()
