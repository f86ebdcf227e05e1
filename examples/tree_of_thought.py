"""Tree of thought: every thought branches in two over four levels (plan, execute, reflect, vote).

30 generations share all of their prefixes: each level's forks run in the same steps and read what is above them once.
"""

from __future__ import annotations

import re
from collections import Counter

import sglite as sgl

BRANCHES = 2
STEPS = {
    "plan": "Make a short plan to solve the problem. Do not solve it yet.",
    "execute": "Carry out the plan step by step.",
    "reflect": "Check the work above and point out any mistake.",
    "vote": "Give the final answer as one number, like: The answer is 7.",
}


def grow(s: sgl.ProgramState, steps: list[str], max_tokens: int) -> list[sgl.ProgramState]:
    """Append the first step to each of two forks and grow the rest from there; returns the leaves.

    Nothing is read here, so nothing waits: the whole tree is under way at once.
    """
    if not steps:
        return [s]
    step, *rest = steps
    forks = s.fork(BRANCHES)
    forks += sgl.user(STEPS[step])
    forks += sgl.assistant(sgl.gen(step, max_tokens=max_tokens, temperature=0.7))
    return [leaf for fork in forks for leaf in grow(fork, rest, max_tokens)]


@sgl.function
def tree_of_thought(s: sgl.ProgramState, question: str, max_tokens: int = 48):
    s += sgl.system("You solve problems carefully.")
    s += sgl.user("Problem: " + question)
    leaves = grow(s, list(STEPS), max_tokens)
    numbers = [found[-1] for leaf in leaves if (found := re.findall(r"-?\d+", leaf["vote"]))]
    s["votes"] = Counter(numbers)
    return s["votes"].most_common(1)[0][0] if numbers else None


def main(max_tokens: int = 48) -> str | None:
    state = tree_of_thought.run(
        question="A farmer has 3 pens with 4 hens each and buys 5 more hens. How many hens has he?",
        max_tokens=max_tokens,
    )
    print(f"votes: {dict(state['votes'])}\nanswer: {state.ret_value}")
    usage = state.usage
    print(f"{usage.completion_tokens} tokens made; {usage.cached_tokens} of {usage.prompt_tokens} prompt tokens cached")
    return state.ret_value


if __name__ == "__main__":
    with sgl.Engine(model="smollm2") as engine:
        sgl.set_default_backend(engine)
        main()
