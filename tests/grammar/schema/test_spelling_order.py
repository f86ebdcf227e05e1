"""One schema has one grammar text, whatever order the process's sets of strings come in."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys

from sglite.grammar import spec
from sglite.grammar.engines import route
from sglite.grammar.schema.cases import Case
from sglite.grammar.schema.expand import _without_copies

_KINDS = ["mode", "size", "files", "dirs", "user", "group"]
SCHEMAS = [
    {
        "type": "object",
        "properties": {"name": {"type": "string"}, **{kind: {"type": "integer"} for kind in _KINDS}},
        "allOf": [
            {"anyOf": [{"not": {"required": [a]}}, {"required": [b, c]}]}
            for a, b, c in itertools.islice(itertools.permutations(_KINDS, 3), 0, 60, 17)
        ],
        "required": ["name"],
    },
    {"enum": ["b", "a", {"x": 1}, "c"]},
    {"type": "string", "not": {"enum": ["one", "two", "three"]}},
    {"oneOf": [{"required": [kind], "properties": {kind: {"pattern": f"^{kind}[ab]?$"}}} for kind in _KINDS[:4]]},
]
_SCRIPT = """
import json, sys
from sglite.grammar import spec
from sglite.grammar.engines import route
print(json.dumps([route.plan(spec.json_schema(schema)).grammar for schema in json.load(sys.stdin)]))
"""


def test_another_process_writes_the_same_grammars() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        input=json.dumps(SCHEMAS),
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "15"},
        timeout=60,
    )
    assert json.loads(done.stdout) == [route.plan(spec.json_schema(schema)).grammar for schema in SCHEMAS]


def test_cases_that_forbid_the_same_keys_are_copies_in_whatever_order_they_name_them() -> None:
    names = [f"key{number}" for number in range(64)]
    pairs = ((a, b) for a, b in itertools.combinations(names, 2) if list(frozenset([a, b])) != list(frozenset([b, a])))
    first, second = next(pairs)  # they want the same place of a small set
    cases: list[Case] = []
    for order in ((first, second), (second, first)):
        case = Case()
        for name in order:
            case.forbid(name)
        cases.append(case)
    assert len(_without_copies(cases)) == 1
