"""An agent with real tools: the model thinks, `select`s a tool, and fills in its arguments under the tool's schema."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

import sglite as sgl


class Calculate(BaseModel):
    left: int
    operation: Literal["+", "-", "*"]
    right: int


class LookUp(BaseModel):
    topic: Annotated[str, Field(max_length=24)]


class Finish(BaseModel):
    answer: Annotated[str, Field(max_length=60)]


FACTS = {"everest": "Mount Everest is 8849 metres high.", "mont blanc": "Mont Blanc is 4806 metres high."}


def calculate(call: Calculate) -> str:
    operations = {"+": operator.add, "-": operator.sub, "*": operator.mul}
    return str(operations[call.operation](call.left, call.right))


def look_up(call: LookUp) -> str:
    return next((fact for name, fact in FACTS.items() if name in call.topic.lower()), "nothing found")


TOOLS: dict[str, tuple[type[BaseModel], Callable[[Any], str]]] = {
    "look_up": (LookUp, look_up),
    "calculate": (Calculate, calculate),
    "finish": (Finish, lambda call: call.answer),
}

PROMPT = """Answer the question with the tools look_up, calculate and finish.

Question: How high is Mont Blanc?
Thought: I need to look up Mont Blanc.
Action: look_up {"topic":"Mont Blanc"}
Observation: Mont Blanc is 4806 metres high.
Thought: I know the answer.
Action: finish {"answer":"4806 metres"}

Question: """


@sgl.function
def react(s: sgl.ProgramState, question: str, max_turns: int = 4):
    s += PROMPT + question + "\n"
    for turn in range(max_turns):
        s += "Thought:" + sgl.gen("thought", stop="\n", max_tokens=32, temperature=0) + "\n"
        tools = list(TOOLS) if turn + 1 < max_turns else ["finish"]
        s += "Action: " + sgl.select("tool", tools) + " "
        schema, tool = TOOLS[s["tool"]]
        s += sgl.gen("call", schema=schema, max_tokens=100, temperature=0) + "\n"
        result = tool(s["call"])
        if s["tool"] == "finish":
            return result
        s += "Observation: " + result + "\n"
    return None


def main() -> str:
    state = react.run(question="How high is Mount Everest?")
    print(state.text().removeprefix(PROMPT))
    return state.ret_value


if __name__ == "__main__":
    with sgl.Engine(model="smollm2") as engine:
        sgl.set_default_backend(engine)
        main()
