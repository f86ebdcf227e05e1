"""A judge: one fork for each dimension reads the same article, the verdicts are joined, a schema holds the scores."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

import sglite as sgl

Score = Annotated[int, Field(ge=1, le=5)]


class Scores(BaseModel):
    clarity: Score
    evidence: Score
    originality: Score
    comment: Annotated[str, Field(max_length=60)]


DIMENSIONS = ["clarity", "evidence", "originality"]
ARTICLE = """Cities should plant more trees. Shade lowers the temperature of a street by several degrees, and a study
of 30 cities found that quarters with many trees need less energy in summer. Trees also hold rain back. They cost
money, but a mature tree gives back more than it takes."""


@sgl.function
def judge(s: sgl.ProgramState, article: str):
    s += sgl.system("You judge articles.")
    s += sgl.user("Here is an article.\n\n" + article)
    forks = s.fork(len(DIMENSIONS))
    for fork, dimension in zip(forks, DIMENSIONS, strict=True):
        fork += sgl.user(f"How is its {dimension}? One sentence.")
        fork += sgl.assistant(sgl.gen("opinion", max_tokens=40, temperature=0))
    forks.join()
    opinions = "\n".join(f"{d}: {o.strip()}" for d, o in zip(DIMENSIONS, s["opinion"], strict=True))
    s += sgl.user(f"Opinions:\n{opinions}\nGive scores from 1 to 5 as JSON.")
    s += sgl.assistant(sgl.gen("scores", schema=Scores, temperature=0))


def main() -> Scores:
    state = judge.run(article=ARTICLE)
    for dimension, opinion in zip(DIMENSIONS, state["opinion"], strict=True):
        print(f"{dimension}: {opinion.strip()}")
    print(state["scores"])
    return state["scores"]


if __name__ == "__main__":
    with sgl.Engine(model="smollm2") as engine:
        sgl.set_default_backend(engine)
        main()
