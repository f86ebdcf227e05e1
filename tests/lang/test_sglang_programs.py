"""Idioms of programs written for SGLang: they run with only the import changed."""

from __future__ import annotations

import json
from math import exp
from typing import Any

import pytest

import sglite as sgl
from tests.fakes.client import ScriptedClient


@pytest.fixture(autouse=True)
def client() -> Any:
    made = ScriptedClient()
    sgl.set_default_backend(made)
    yield made
    sgl.set_default_backend(None)


def test_tool_use_with_a_var_scope(client: ScriptedClient) -> None:
    @sgl.function
    def tool_use(s, lhs, rhs):
        s += "Compute " + str(lhs) + " times " + str(rhs) + ": calculate("
        s += sgl.gen("expression", stop=")") + ") = "
        with s.var_scope("answer"):
            s += str(6 * 7)

    client._answers = iter(["6*7) and on"])
    state = tool_use(lhs=6, rhs=7, temperature=0)
    assert state["expression"] == "6*7"
    assert int(state["answer"]) == 42


def test_json_by_pieces() -> None:
    @sgl.function
    def decode_json(s):
        with s.var_scope("json_output"):
            s += "{\n"
            s += '  "name": ' + sgl.gen_string() + ",\n"
            s += '  "population": ' + sgl.gen_int() + ",\n"
            s += '  "country": ' + sgl.gen(dtype=str) + "\n"
            s += "}"

    state = decode_json.run(max_new_tokens=64)
    assert json.loads(state["json_output"]) == {"name": "a", "population": 1, "country": "a"}


def test_parallel_decoding_and_encoding() -> None:
    @sgl.function
    def parallel(s, topic, contexts):
        s += "Tips for " + topic + ":\n"
        for i in range(1, 3):
            s += f"{i}." + sgl.gen(max_tokens=16, stop=[".", "\n"]) + ".\n"
        forks = s.fork(2)
        for i in range(2):
            forks[i] += f"Now, I expand tip {i + 1}:"
            forks[i] += sgl.gen("detailed_tip", 64, stop=["\n\n"])
        forks.join()
        for i in range(2):
            s += f"Tip {i + 1}:" + forks[i]["detailed_tip"] + "\n"
        more = s.fork(len(contexts))
        more += lambda i: f"Statement {i}: " + contexts[i] + "\n"
        more.join(mode="concate_and_append")
        s += "In summary," + sgl.gen("summary", max_tokens=512)

    state = parallel.run(topic="writing", contexts=["A", "B"], temperature=0.3)
    assert isinstance(state["summary"], str)
    assert len(state["detailed_tip"]) == 2
    assert "Statement 0: A\nStatement 1: B\nIn summary," in state.text()


def test_chain_of_thought_decoding_over_top_tokens() -> None:
    @sgl.function
    def cot_decoding(s, question, get_top_k):
        s += sgl.user("Question: " + question + "\nAnswer:")
        s += sgl.assistant_begin()
        step_0 = s.fork(1)[0]
        forks = s.fork(get_top_k)
        answer_forks = s.fork(get_top_k)
        step_0 += sgl.gen(
            "get_top_k",
            max_tokens=0,
            return_logprob=True,
            top_logprobs_num=get_top_k,
            return_text_in_logprobs=True,
        )
        logprobs = step_0.get_meta_info("get_top_k")["output_top_logprobs"][0]
        for idx, (f, token) in enumerate(zip(forks, logprobs, strict=True)):
            _logprob, _token_id, text = token
            f += text
            f += sgl.gen("answer", temperature=0, max_tokens=24, return_logprob=True, top_logprobs_num=2)
            x1s = [exp(xt[0][0]) for xt in f.get_meta_info("answer")["output_top_logprobs"]]
            assert x1s
            answer_forks[idx] += text + f["answer"] + "\nSo the answer is"
            answer_forks[idx] += sgl.gen("answer_span", temperature=0, max_tokens=64)
            assert answer_forks[idx]["answer_span"].replace("\n", " ").strip(":")
            assert str(answer_forks[idx]).startswith("ProgramState(")

    cot_decoding.run(question="How many?", get_top_k=3)


def test_react_with_unnamed_gens() -> None:
    @sgl.function
    def react(s, question):
        s += "Question: " + question + "\n"
        for i in range(1, 5):
            s += f"Thought {i}:" + sgl.gen(stop=[".", "\n"]) + ".\n"
            s += f"Action {i}: " + sgl.select(f"action_{i}", ["Search", "Finish"])
            if s[f"action_{i}"] == "Search":
                s += " [" + sgl.gen(stop="]") + "].\n"
            else:
                s += " [" + sgl.gen("answer", stop="]") + "].\n"
                break

    assert react.run(question="Who?", temperature=0.1).text().count("Thought") == 4


def test_the_default_backend_and_the_batch_forms() -> None:
    @sgl.function
    def text_qa(s, question):
        s += "Q: " + question + "\n"
        s += "A:" + sgl.gen("answer", stop="\n")

    assert sgl.global_config.default_backend is not None
    states = text_qa.run_batch([{"question": "a"}, {"question": "b"}], progress_bar=True)
    assert sorted(s["answer"] for s in states) == ["answer 1", "answer 2"]
    bound = text_qa.bind(question="c")
    assert bound.run().text().startswith("Q: c")
    state = text_qa.run(question="d", stream=True)
    assert "".join(state.text_iter()).startswith("Q: d\nA:")
    assert text_qa.run("e").error() is None
    assert sgl.get_server_info()["name"] == "scripted"
