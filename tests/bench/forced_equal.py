"""Does forced text change a token, over 200 prompts?

SmolLM2 in float32 on the CPU, greedy: 200 prompts over the bench's schemas, an expression and a choice, each drawn
token by token (`jump_forward=False`), with forced text at once, overlapped (as on a GPU: also text that is guessed to
follow a token in flight), and with forced text behind drafts of the prompt. Prints what differs; the last line is one
JSON object. Ends with status 1 where anything differs.

    python tests/bench/forced_equal.py [--prompts 200] [--max-tokens 64] [--ways forced,overlapped,drafts]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import sglite as sgl
from sglite.bench.structured.cases import SCHEMAS
from sglite.bench.structured.real import RECORDS
from sglite.grammar import spec
from sglite.protocol import GrammarSpec, RequestOutput

TOPICS = ("a lamp", "Ada", "rain", "two trains", "the sea", "an old clock", "bread", "a king", "Mars", "a letter")


def constraints() -> list[GrammarSpec]:
    # One item of the arrays that a bench repeats until its tokens are used up.
    schemas = [*(schema.get("items", schema) for schema in SCHEMAS.values()), RECORDS]
    return [
        *(spec.json_schema(schema) for schema in schemas),
        spec.regex(r"(Monday|Tuesday|Wednesday), the \d{1,2}(st|nd|rd|th) of (January|February)"),
        spec.choice(["it is certainly true", "it is certainly false", "it cannot be known"]),
    ]


WAYS: dict[str, dict[str, Any]] = {
    "forced": {"overlap": False},
    "overlapped": {"overlap": True},
    "drafts": {"overlap": True, "prompt_lookup": 8},
}


def answers(
    options: dict[str, Any], prompts: int, max_tokens: int
) -> tuple[list[RequestOutput], float, dict[str, Any]]:
    sampling = {"temperature": 0, "max_tokens": max_tokens}
    grammars = constraints()
    found: list[RequestOutput] = []
    with sgl.Engine(model="smollm2", **options) as engine:
        began = time.perf_counter()
        for number, grammar in enumerate(grammars):
            mine = range(number, prompts, len(grammars))
            texts = [
                f"Record {i}: write about {TOPICS[i // len(grammars) % len(TOPICS)]}.\n" * (1 + i % 3) for i in mine
            ]
            for _ in range(1 if "jump_forward" in options else 2):  # the second time it is known what is forced where
                outputs = engine.generate(texts, sampling, constraint=grammar)
            found += outputs
        return found, time.perf_counter() - began, engine.stats()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--ways", default=",".join(WAYS))
    args = parser.parse_args()
    drawn, seconds, _ = answers({"overlap": False, "jump_forward": False}, args.prompts, args.max_tokens)
    report: dict[str, Any] = {"prompts": len(drawn), "drawn_s": round(seconds, 1), "different": {}}
    for name in args.ways.split(","):
        found, seconds, stats = answers(WAYS[name], args.prompts, args.max_tokens)
        pairs = [(one, other) for one, other in zip(drawn, found, strict=True) if one.token_ids != other.token_ids]
        for one, other in pairs:
            print(f"{name}: {one.text!r}\n{' ' * len(name)}  {other.text!r}")
        usage = [output.usage for output in found]
        tokens = sum(one.completion_tokens for one in usage)
        report["different"][name] = len(pairs)
        report[name] = {
            "s": round(seconds, 1),
            "completion_tokens": tokens,
            "forced_share": round(sum(one.forced_tokens for one in usage) / tokens, 3),
            "prompts_with_forced_text": sum(one.forced_tokens > 0 for one in usage),
            "guessed": stats["guessed_runs"],
            "wrong_guesses": stats["wrong_guesses"],
        }
    print(json.dumps(report))
    sys.exit(any(report["different"].values()))


if __name__ == "__main__":
    main()
