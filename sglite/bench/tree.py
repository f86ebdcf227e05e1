"""A tree of thought, branching 2 over 4 levels, as a program and as the same 30 calls one by one."""

from __future__ import annotations

from typing import Any

import sglite as sgl
from sglite.protocol import SamplingParams
from sglite.runtime.async_engine import Engine

_STEPS = ("Make a plan.", "Carry out the plan.", "Check the work.", "Give the final answer as a number.")
_TOKENS = 48
_QUESTION = "A farmer has 3 pens with 4 hens each and buys 5 more hens. How many hens has he? " * 4


def as_program(engine: Engine) -> list[str]:
    """Runs the program; returns the prompt of every generation, for `as_calls`."""
    prompts: list[str] = []

    def grow(s: Any, steps: tuple[str, ...]) -> list[tuple[Any, str]]:
        if not steps:
            return []
        forks = s.fork(2)
        grown: list[tuple[Any, str]] = []
        for i, fork in enumerate(forks):
            name = f"level_{len(steps)}"
            fork += f"\n{steps[0]} Attempt {i + 1}:"
            fork += sgl.gen(name, max_tokens=_TOKENS, temperature=0, ignore_eos=True)
            grown.append((fork, name))
            grown.extend(grow(fork, steps[1:]))
        return grown

    @sgl.function
    def tree(s: Any) -> None:
        s += "Problem: " + _QUESTION
        for state, name in grow(s, _STEPS):
            text, answer = state.text(), state[name]
            prompts.append(text[: text.index(answer)] if answer in text else text)

    tree.run(backend=engine)
    return prompts


def as_calls(engine: Engine, prompts: list[str]) -> None:
    sampling = SamplingParams(max_tokens=_TOKENS, temperature=0.0, ignore_eos=True)
    for prompt in prompts:
        engine.generate(prompt, sampling)
