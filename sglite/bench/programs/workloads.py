"""The workloads, each as a program and as loose calls. Answers have fixed lengths (the end of a text is ignored), so
that both ways make the same tokens, with weights that say nothing too. Lengths are in tokens, before the scale.

    tree_of_thought      branching 2 over 4 levels: 30 generations of 256
    skeleton_of_thought  points (64), read by the program, then 6 forks of 128
    llm_judge            an article of 1,500, 6 forks of 256, joined, scores under a schema
    mmlu                 57 subjects with 5 shots (600) each, 2 questions (80) a subject, one token
    hellaswag            20 shots (1,600), 200 questions (60) with 4 endings (25) to select from
    react                a preamble of 1,700, 6 turns: thought (48), select of 3 tools, arguments (24), a tool that
                         takes 50 to 500 ms and answers 60
    multi_turn_chat      4 turns of 128 in and 128 out
    multi_document_qa    10 documents of 400 in forks, a note (48) each, joined, an answer of 128
    rag_json             context of 1,000, an object under a schema
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

import sglite as sgl
from sglite.bench.programs.loose import Loose
from sglite.bench.programs.shapes import Texts
from sglite.errors import InvalidRequest
from sglite.lang.nodes import Gen, Node
from sglite.lang.program import Program
from sglite.protocol import SamplingParams

Arguments = dict[str, Any]


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _as_gen(node: Node) -> Gen:
    assert isinstance(node, Gen)
    return node


class Workload(Protocol):
    """`program` and `calls` take the same arguments and make the same tokens."""

    program: Program

    def arguments(self, at_once: int) -> list[Arguments]:
        """One for each program; `at_once` of them run at the same time."""
        ...

    @property
    def calls(self) -> Callable[..., Coroutine[Any, Any, None]]:
        """calls(loose, **arguments)"""
        ...

    def branches(self) -> int:
        """States of a program that make a call."""
        ...

    def pause_s(self, arguments: Arguments) -> float:
        """Seconds that a program's tools take, one after the other."""
        ...


class _Base:
    def __init__(self, texts: Texts) -> None:
        self.texts = texts
        self.program = self.make_program()

    def make_program(self) -> Program:
        raise NotImplementedError

    def branches(self) -> int:
        return 1

    def pause_s(self, arguments: Arguments) -> float:
        return 0.0

    def gen(self, name: str, tokens: int) -> Node:
        """Of exactly that many tokens, scaled."""
        return sgl.gen(name, max_tokens=self.texts.shape.tokens(tokens), temperature=0, ignore_eos=True)

    def sampling(self, tokens: int) -> SamplingParams:
        return SamplingParams(max_tokens=self.texts.shape.tokens(tokens), temperature=0.0, ignore_eos=True)


class TreeOfThought(_Base):
    steps = ("Make a plan.", "Carry out the plan.", "Check the work.", "Give the final answer.")

    def arguments(self, at_once: int) -> list[Arguments]:
        return [{"problem": self.texts.text(f"problem {i}", 128)} for i in range(at_once)]

    def branches(self) -> int:
        return 30

    def make_program(self) -> Program:
        @sgl.function
        def tree_of_thought(s: Any, problem: str) -> None:
            s += "Problem: " + problem

            def grow(state: Any, steps: Sequence[str]) -> None:
                if steps:
                    for i, fork in enumerate(state.fork(2)):
                        fork += f"\n{steps[0]} Attempt {i + 1}:" + self.gen("thought", 256)
                        grow(fork, steps[1:])

            grow(s, self.steps)

        return tree_of_thought

    async def calls(self, loose: Loose, problem: str) -> None:
        loose.add("Problem: " + problem)

        async def thought(at: Loose, i: int, steps: Sequence[str]) -> None:
            at.add(f"\n{steps[0]} Attempt {i + 1}:")
            await at.gen(self.sampling(256))
            await grow(at, steps[1:])

        async def grow(at: Loose, steps: Sequence[str]) -> None:
            if steps:
                await asyncio.gather(*(thought(fork, i, steps) for i, fork in enumerate(at.fork(2))))

        await grow(loose, self.steps)


class SkeletonOfThought(_Base):
    points = 6

    def arguments(self, at_once: int) -> list[Arguments]:
        return [{"question": self.texts.text(f"question {i}", 64)} for i in range(at_once)]

    def branches(self) -> int:
        return 1 + self.points

    def make_program(self) -> Program:
        @sgl.function
        def skeleton_of_thought(s: Any, question: str) -> None:
            s += "Question: " + question + "\nPoints:" + self.gen("points", 64)
            assert s["points"]  # a program looks at its points before it forks
            forks = s.fork(self.points)
            for i, fork in enumerate(forks):
                fork += f"\nPoint {i + 1} in full:" + self.gen("text", 128)
            forks.join()

        return skeleton_of_thought

    async def calls(self, loose: Loose, question: str) -> None:
        loose.add("Question: " + question + "\nPoints:")
        await loose.gen(self.sampling(64))

        async def expand(fork: Loose, i: int) -> None:
            fork.add(f"\nPoint {i + 1} in full:")
            await fork.gen(self.sampling(128))

        await asyncio.gather(*(expand(fork, i) for i, fork in enumerate(loose.fork(self.points))))


_POINTS = {"type": "integer", "minimum": 1, "maximum": 5}
_SCORES = _object(clarity=_POINTS, evidence=_POINTS, style=_POINTS, comment={"type": "string", "maxLength": 40})


class LlmJudge(_Base):
    dimensions = ("clarity", "evidence", "originality", "style", "structure", "tone")

    def arguments(self, at_once: int) -> list[Arguments]:
        return [{"article": self.texts.text(f"article {i}", 1500)} for i in range(at_once)]

    def branches(self) -> int:
        return 1 + len(self.dimensions)

    def joined(self, opinions: Sequence[str]) -> str:
        """Cut to a length that does not depend on what tokenisation makes of noise."""
        lines = [f"{d}: {o[:120]}" for d, o in zip(self.dimensions, opinions, strict=True)]
        return "\nOpinions:\n" + "\n".join(lines) + "\nScores: "

    def scores(self) -> Gen:
        return _as_gen(sgl.gen("scores", json_schema=_SCORES, max_tokens=96, temperature=0))

    def make_program(self) -> Program:
        @sgl.function
        def llm_judge(s: Any, article: str) -> None:
            s += "Article: " + article
            forks = s.fork(len(self.dimensions))
            for fork, dimension in zip(forks, self.dimensions, strict=True):
                fork += f"\nHow is its {dimension}?" + self.gen("opinion", 256)
            forks.join()
            s += self.joined(s["opinion"]) + self.scores()

        return llm_judge

    async def calls(self, loose: Loose, article: str) -> None:
        loose.add("Article: " + article)

        async def opinion(fork: Loose, dimension: str) -> str:
            fork.add(f"\nHow is its {dimension}?")
            return await fork.gen(self.sampling(256))

        forks = zip(loose.fork(len(self.dimensions)), self.dimensions, strict=True)
        loose.add(self.joined(await asyncio.gather(*(opinion(f, d) for f, d in forks))))
        await loose.gen(SamplingParams(max_tokens=96, temperature=0.0), self.scores().grammar)


class Mmlu(_Base):
    def arguments(self, at_once: int) -> list[Arguments]:
        subjects = self.texts.shape.count(57)
        return [
            {"shots": self.texts.text(f"subject {i}", 600), "question": self.texts.text(f"question {i}.{j}", 80)}
            for i in range(subjects)
            for j in range(2)
        ]

    def make_program(self) -> Program:
        @sgl.function
        def mmlu(s: Any, shots: str, question: str) -> None:
            s += shots + "\n\nQuestion: " + question + "\nAnswer:"
            s += sgl.gen("answer", max_tokens=1, temperature=0, ignore_eos=True)

        return mmlu

    async def calls(self, loose: Loose, shots: str, question: str) -> None:
        loose.add(shots + "\n\nQuestion: " + question + "\nAnswer:")
        await loose.gen(SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))


class Hellaswag(_Base):
    def arguments(self, at_once: int) -> list[Arguments]:
        text = self.texts.text
        return [
            {
                "shots": text("shots", 1600),
                "question": text(f"question {i}", 60),
                "endings": [" " + text(f"ending {i}.{j}", 25) for j in range(4)],
            }
            for i in range(self.texts.shape.count(200))
        ]

    def make_program(self) -> Program:
        @sgl.function
        def hellaswag(s: Any, shots: str, question: str, endings: list[str]) -> None:
            s += shots + "\n\n" + question
            s += sgl.select("answer", endings)

        return hellaswag

    async def calls(self, loose: Loose, shots: str, question: str, endings: list[str]) -> None:
        loose.add(shots + "\n\n" + question)
        await loose.select(endings)


class React(_Base):
    turns = 6
    tools = (" search", " look_up", " calculate")

    def arguments(self, at_once: int) -> list[Arguments]:
        preamble, dice = self.texts.text("preamble", 1700), random.Random("pauses")
        scale = self.texts.shape.pause_scale
        return [
            {
                "preamble": preamble,
                "question": self.texts.text(f"agent {i}", 40),
                "results": [self.texts.text(f"result {i}.{j}", 60) for j in range(self.turns)],
                "pauses": [scale * dice.uniform(0.05, 0.5) for _ in range(self.turns)],
            }
            for i in range(at_once)
        ]

    def pause_s(self, arguments: Arguments) -> float:
        return sum(arguments["pauses"])

    def make_program(self) -> Program:
        @sgl.function
        async def react(s: Any, preamble: str, question: str, results: list[str], pauses: list[float]) -> None:
            s += preamble + "\nQuestion: " + question
            for result, pause in zip(results, pauses, strict=True):
                s += "\nThought:" + self.gen("thought", 48)
                s += "\nAction:" + sgl.select("tool", list(self.tools))
                s += " with" + self.gen("arguments", 24)
                assert s["tool"] and s["arguments"]
                await asyncio.sleep(pause)
                s += "\nObservation: " + result

        return react

    async def calls(self, loose: Loose, preamble: str, question: str, results: list[str], pauses: list[float]) -> None:
        loose.add(preamble + "\nQuestion: " + question)
        for result, pause in zip(results, pauses, strict=True):
            loose.add("\nThought:")
            await loose.gen(self.sampling(48))
            loose.add("\nAction:")
            await loose.select(self.tools)
            loose.add(" with")
            await loose.gen(self.sampling(24))
            await asyncio.sleep(pause)
            loose.add("\nObservation: " + result)


class MultiTurnChat(_Base):
    turns = 4

    def arguments(self, at_once: int) -> list[Arguments]:
        return [{"said": [self.texts.text(f"chat {i}.{j}", 128) for j in range(self.turns)]} for i in range(at_once)]

    def make_program(self) -> Program:
        @sgl.function
        def multi_turn_chat(s: Any, said: list[str]) -> None:
            for i, text in enumerate(said):
                s += "\nUser: " + text + "\nAssistant:" + self.gen(f"answer_{i}", 128)

        return multi_turn_chat

    async def calls(self, loose: Loose, said: list[str]) -> None:
        for text in said:
            loose.add("\nUser: " + text + "\nAssistant:")
            await loose.gen(self.sampling(128))


class MultiDocumentQa(_Base):
    documents = 10

    def arguments(self, at_once: int) -> list[Arguments]:
        return [
            {
                "question": self.texts.text(f"question {i}", 64),
                "documents": [self.texts.text(f"document {i}.{j}", 400) for j in range(self.documents)],
            }
            for i in range(at_once)
        ]

    def branches(self) -> int:
        return 1 + self.documents

    def joined(self, notes: Sequence[str]) -> str:
        return "\nNotes:\n" + "\n".join(note[:120] for note in notes) + "\nAnswer:"

    def make_program(self) -> Program:
        @sgl.function
        def multi_document_qa(s: Any, question: str, documents: list[str]) -> None:
            s += "Question: " + question
            forks = s.fork(len(documents))
            for fork, document in zip(forks, documents, strict=True):
                fork += "\nDocument: " + document + "\nNote:" + self.gen("note", 48)
            forks.join()
            s += self.joined(s["note"]) + self.gen("answer", 128)

        return multi_document_qa

    async def calls(self, loose: Loose, question: str, documents: list[str]) -> None:
        loose.add("Question: " + question)

        async def note(fork: Loose, document: str) -> str:
            fork.add("\nDocument: " + document + "\nNote:")
            return await fork.gen(self.sampling(48))

        forks = zip(loose.fork(len(documents)), documents, strict=True)
        loose.add(self.joined(await asyncio.gather(*(note(f, d) for f, d in forks))))
        await loose.gen(self.sampling(128))


_ANSWER = _object(
    answer={"type": "string", "maxLength": 80},
    sources={"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
    sure={"type": "boolean"},
)


class RagJson(_Base):
    def arguments(self, at_once: int) -> list[Arguments]:
        return [
            {"context": self.texts.text(f"context {i}", 1000), "question": self.texts.text(f"question {i}", 32)}
            for i in range(at_once)
        ]

    def answer(self) -> Gen:
        return _as_gen(sgl.gen("answer", json_schema=_ANSWER, max_tokens=160, temperature=0))

    def make_program(self) -> Program:
        @sgl.function
        def rag_json(s: Any, context: str, question: str) -> None:
            s += "Context: " + context + "\nQuestion: " + question + "\nAnswer: " + self.answer()

        return rag_json

    async def calls(self, loose: Loose, context: str, question: str) -> None:
        loose.add("Context: " + context + "\nQuestion: " + question + "\nAnswer: ")
        await loose.gen(SamplingParams(max_tokens=160, temperature=0.0), self.answer().grammar)


WORKLOADS: dict[str, Callable[[Texts], Workload]] = {
    "tree_of_thought": TreeOfThought,
    "skeleton_of_thought": SkeletonOfThought,
    "llm_judge": LlmJudge,
    "mmlu": Mmlu,
    "hellaswag": Hellaswag,
    "react": React,
    "multi_turn_chat": MultiTurnChat,
    "multi_document_qa": MultiDocumentQa,
    "rag_json": RagJson,
}


def workload(name: str, texts: Texts) -> Workload:
    """Raises InvalidRequest for a name that is none."""
    if name not in WORKLOADS:
        raise InvalidRequest(f"no workload {name!r}; there are {', '.join(WORKLOADS)}", param="workloads")
    return WORKLOADS[name](texts)
