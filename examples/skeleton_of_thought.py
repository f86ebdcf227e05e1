"""Skeleton of thought: first the points of an answer, then all points in full at the same time, in forks."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, TypeAdapter

import sglite as sgl

Point = Annotated[str, Field(min_length=4, max_length=32)]
Points = TypeAdapter(Annotated[list[Point], Field(min_length=3, max_length=4)])


@sgl.function
def skeleton_of_thought(s: sgl.ProgramState, question: str):
    s += sgl.user(f"{question}\nList the main points as a JSON array of short strings.")
    s += sgl.assistant(sgl.gen("points", schema=Points, max_tokens=160, temperature=0))
    forks = s.fork(len(s["points"]))
    for fork, point in zip(forks, s["points"], strict=True):
        fork += sgl.user(f"Explain this point in one sentence: {point}")
        fork += sgl.assistant(sgl.gen("sentence", max_tokens=40, temperature=0))
    forks.join()
    return list(zip(s["points"], s["sentence"], strict=True))


def main() -> list[tuple[str, str]]:
    answer = skeleton_of_thought.run(question="How can I sleep better?").ret_value
    for number, (point, sentence) in enumerate(answer, start=1):
        print(f"{number}. {point}: {sentence.strip()}")
    return answer


if __name__ == "__main__":
    with sgl.Engine(model="smollm2") as engine:
        sgl.set_default_backend(engine)
        main()
