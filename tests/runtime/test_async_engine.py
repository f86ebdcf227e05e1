from __future__ import annotations

import asyncio
import gc
import itertools
import threading
import time
import uuid
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from sglite.errors import EngineDead, InvalidGrammar, InvalidRequest, RequestAborted, SgliteError
from sglite.protocol import (
    FinishReason,
    GenerateRequest,
    GrammarSpec,
    ProgramRef,
    SamplingParams,
    ScoreRequest,
)
from sglite.runtime.async_engine import Engine
from sglite.runtime.async_engine import messages as m
from sglite.runtime.async_engine.arguments import is_single, sampling_params
from tests.fakes.core import ScriptedCore, scripted_engine


@pytest.fixture
def engine() -> object:
    with scripted_engine() as engine:
        yield engine


def test_one_prompt_gives_one_output_and_a_list_gives_a_list_in_order(engine: Engine) -> None:
    assert engine.generate("hello").text == "hello"
    assert [o.text for o in engine.generate(["c", "a", "bb"])] == ["c", "a", "bb"]
    assert engine.generate([104, 105]).text == "hi"
    assert [o.text for o in engine.generate([[104], [105]])] == ["h", "i"]


def test_n_gives_a_list_for_each_prompt(engine: Engine) -> None:
    answers = engine.generate(["ab", "c"], {"n": 2})
    assert [[o.text for o in several] for several in answers] == [["ab", "ab"], ["c", "c"]]
    assert [o.index for o in answers[0]] == [0, 1]


def test_a_stream_joins_to_the_whole_text(engine: Engine) -> None:
    pieces = list(engine.stream("größe €"))
    assert "".join(p.text for p in pieces) == "größe €"
    assert len(pieces) == 7
    assert pieces[-1].finish_reason is FinishReason.STOP
    assert all("\ufffd" not in p.text for p in pieces)


def test_a_stream_of_a_list_of_prompts_is_refused_in_words(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="one prompt"):
        engine.stream(["a", "b"])  # type: ignore[list-item]


async def test_async_answers_and_streams(engine: Engine) -> None:
    outputs = await engine.generate_async(["x", "yy"], {"max_new_tokens": 1})
    assert [(o.text, o.finish_reason) for o in outputs] == [("x", "stop"), ("y", "length")]
    assert [p.text async for p in engine.stream_async("abc")] == ["a", "b", "c"]


def test_many_threads_and_event_loops_share_one_engine(engine: Engine) -> None:
    found: dict[int, list[str]] = {}

    def blocking(number: int) -> None:
        found[number] = [engine.generate(f"t{number}-{i}").text for i in range(5)]

    def looping(number: int) -> None:
        async def several() -> list[str]:
            outputs = await asyncio.gather(*(engine.generate_async(f"l{number}-{i}") for i in range(5)))
            return [o.text for o in outputs]

        found[number] = asyncio.run(several())

    threads = [threading.Thread(target=blocking if i % 2 else looping, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == {n: [f"{'t' if n % 2 else 'l'}{n}-{i}" for i in range(5)] for n in range(8)}


def test_one_wake_up_a_turn_for_a_whole_event_loop() -> None:
    core = ScriptedCore(lambda request, index: "x" * 20)
    with scripted_engine(core=core) as engine:

        async def run() -> int:
            loop = asyncio.get_running_loop()
            calls = 0
            original = loop.call_soon_threadsafe

            def counting(*args: object, **kwargs: object) -> object:
                nonlocal calls
                calls += 1
                return original(*args, **kwargs)  # type: ignore[arg-type]

            loop.call_soon_threadsafe = counting  # type: ignore[method-assign]
            requests = [
                GenerateRequest(request_id=f"r{i}", prompt=(65,), sampling_params=SamplingParams(max_tokens=20))
                for i in range(50)
            ]
            await asyncio.gather(*(_read(engine, r) for r in requests))
            return calls

        calls = asyncio.run(run())
    assert calls < 120  # 50 requests x 20 tokens = 1,000 outputs, in at least 20 turns


async def _read(engine: Engine, request: GenerateRequest) -> str:
    return "".join([o.text async for o in engine.stream_request(request)])


def test_an_error_is_raised_by_the_call_that_caused_it(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        engine.generate("")
    with pytest.raises(InvalidRequest, match="temperature"):
        engine.generate("a", {"temperature": float("nan")})
    with pytest.raises(InvalidRequest, match="unknown sampling parameter 'temprature'"):
        engine.generate("a", {"temprature": 1})
    assert engine.generate("still here").text == "still here"


def test_an_unknown_parameter_is_refused_with_the_name_that_was_meant(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="'max_tokns'; did you mean max_tokens") as got:
        engine.generate("a", {"max_tokns": 1})
    assert "json_schema" in str(got.value)
    with pytest.raises(InvalidRequest, match="did you mean json_schema"):
        engine.generate("a", {"json_shema": {}})


async def test_no_prompts_give_no_answers(engine: Engine) -> None:
    assert engine.generate([], {"max_tokens": 3}) == []
    assert await engine.generate_async([]) == []
    with pytest.raises(InvalidRequest, match="empty"):
        engine.generate("")


async def test_a_prompt_is_truncated_where_the_call_says_so(engine: Engine) -> None:
    engine.generate("a")
    engine.generate("a", {"truncate_prompt": False})
    engine.generate("a", {"truncate_prompt": True, "max_tokens": 2})
    engine.generate(["a", "b"], [{"truncate_prompt": True}, None])
    engine.generate("a", truncate_prompt=True)
    await engine.generate_async("a", truncate_prompt=True)
    list(engine.stream("a", truncate_prompt=True))
    engine.chat([{"role": "user", "content": "a"}], truncate_prompt=True)
    found = [request.truncate_prompt for request in engine.core.requests]  # type: ignore[attr-defined]
    assert found == [False, False, True, True, False, True, True, True, True]
    with pytest.raises(InvalidRequest, match="truncate_prompt"):
        engine.generate("a", {"truncate_prompt": "yes"})


def test_a_failed_prompt_of_a_list_can_be_returned(engine: Engine) -> None:
    good, bad = engine.generate(["a", ""], on_error="return")
    assert good.text == "a"
    assert bad.finish_reason == "error"
    assert bad.error.type == "InvalidRequest"
    with pytest.raises(InvalidRequest):
        engine.generate(["a", ""])


def test_closing_a_stream_aborts_its_request() -> None:
    core = ScriptedCore(lambda request, index: "x" * 10_000, step_s=0.001)
    with scripted_engine(core=core) as engine:
        stream = engine.stream("go", SamplingParams())
        next(stream)
        stream.close()
        _until(lambda: core.num_running == 0)
        assert len(core.aborted) == 1


async def test_cancelling_a_coroutine_aborts_its_request() -> None:
    core = ScriptedCore(lambda request, index: "x" * 10_000, step_s=0.001)
    with scripted_engine(core=core) as engine:
        task = asyncio.ensure_future(engine.generate_async(["a", "b"], SamplingParams()))
        while core.num_running < 2:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(_until, lambda: core.num_running == 0)


def test_ctrl_c_in_generate_aborts_and_leaves_the_engine_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    core = ScriptedCore(lambda request, index: "x" * (10_000 if request.prompt[0] == 97 else 1), step_s=0.001)
    with scripted_engine(core=core) as engine:
        from sglite.runtime.async_engine.delivery import ThreadSink

        with monkeypatch.context() as patch:
            patch.setattr(ThreadSink, "get", lambda self, timeout=None: (_ for _ in ()).throw(KeyboardInterrupt()))
            with pytest.raises(KeyboardInterrupt):
                engine.generate("a", SamplingParams())
        _until(lambda: core.num_running == 0)
        assert engine.generate("b").text == "x"


async def test_abort_reaches_whoever_waits_and_is_idempotent() -> None:
    core = ScriptedCore(lambda request, index: "x" * 10_000, step_s=0.001)
    with scripted_engine(core=core) as engine:
        request = GenerateRequest(request_id="mine", prompt=(65,))
        stream = engine.stream_request(request)
        await anext(stream)
        for request_id in ("mine", "mine", "unknown"):
            await engine.abort(request_id)
        with pytest.raises(RequestAborted):
            while True:
                await anext(stream)
        await engine.abort("mine")
        assert (await engine.score_request(engine._score_request("p", ["ab"]))).logprobs == ((-97.0, -98.0),)


async def test_an_id_in_use_is_refused(engine: Engine) -> None:
    first = engine.stream_request(GenerateRequest(request_id="same", prompt=(65, 66)))
    await anext(first)
    engine._front.router.register("taken", engine._front.mailboxes.sink())
    with pytest.raises(InvalidRequest, match="in use"):
        await anext(engine.stream_request(GenerateRequest(request_id="taken", prompt=(65,))))
    await first.aclose()


def test_a_broken_loop_is_reported_to_everybody_at_once() -> None:
    core = ScriptedCore(lambda request, index: "x" * 10_000, step_s=0.001)
    engine = scripted_engine(core=core)
    stream = engine.stream("a", SamplingParams())
    next(stream)
    core.fail_next_step = RuntimeError("boom")
    with pytest.raises(EngineDead, match="boom"):
        list(stream)
    started = time.monotonic()
    with pytest.raises(EngineDead):
        engine.generate("later")
    assert time.monotonic() - started < 0.5
    assert not engine.alive
    assert core.closed
    engine.close()


def test_a_closed_engine_says_so_and_closing_twice_is_fine() -> None:
    engine = scripted_engine()
    engine.close()
    engine.close()
    with pytest.raises(EngineDead, match="closed"):
        engine.generate("a")


def test_a_dead_engine_raises_a_new_error_each_time() -> None:
    engine = scripted_engine()
    engine.shutdown()
    raised: list[EngineDead] = []
    for call in (lambda: engine.generate("a"), lambda: engine.generate("a"), engine.stats, engine.stats):
        with pytest.raises(EngineDead, match="closed") as got:
            call()
        raised.append(got.value)
    assert len({id(error) for error in raised}) == 4


def test_an_engine_that_is_dropped_ends_its_thread() -> None:
    engine = scripted_engine()
    assert engine.generate("a").text == "a"
    core = engine.core  # type: ignore[attr-defined]
    del engine
    gc.collect()
    _until(lambda: core.closed)


def test_while_an_engine_runs_the_collector_leaves_alone_what_was_there_before_it() -> None:
    engine = scripted_engine()
    assert gc.get_freeze_count() > 1000
    engine.shutdown()
    assert gc.get_freeze_count() == 0


def test_an_idle_loop_does_not_spin(engine: Engine) -> None:
    engine.generate("a")
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.05


async def test_the_client_calls_are_answered(engine: Engine) -> None:
    assert (await engine.compile_grammar(GrammarSpec(kind="regex", source="a"))).engine == "scripted"
    with pytest.raises(InvalidGrammar):
        await engine.compile_grammar(GrammarSpec(kind="regex", source="bad"))
    assert await engine.warm_prefix((1, 2, 3)) == 3
    assert await engine.flush_cache() is True
    assert await engine.stats_async() == {"running": 0}
    await engine.release("unknown")


def test_sglangs_names_for_sampling_parameters_work() -> None:
    params, spec = sampling_params(
        {"max_new_tokens": 5, "stop": "\n", "top_k": -1, "regex": "a+", "logit_bias": {"7": 1}, "no_stop_trim": True}
    )
    assert params == SamplingParams(max_tokens=5, stop=("\n",), top_k=-1, logit_bias={7: 1.0}, include_stop=True)
    assert spec == GrammarSpec(kind="regex", source="a+")
    with pytest.raises(InvalidRequest, match="only one constraint"):
        sampling_params({"regex": "a", "ebnf": 'root ::= "a"'})
    assert sampling_params(None)[0].max_tokens == 128
    assert sampling_params(SamplingParams())[0].max_tokens is None


def test_a_prompt_is_text_or_ids_of_any_kind() -> None:
    assert all(is_single(each) for each in ("a", "", [], [1], (1, 2), np.array([1]), torch.tensor([1, 2]), range(2)))
    assert not any(is_single(each) for each in (["a"], [[1], [2]], [[]], np.array([[1]]), ["a", [1]]))


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        (["a", 3], "prompt 1 of the list must be a text or a list of token ids, not 3"),
        ([[1], None], "prompt 1 of the list must be .*, not None"),
        ([b"a"], "prompt 0 of the list must be .*, not b'a'"),
        (b"a", "a prompt is a text or a list of token ids, not b'a'"),
        (3, "a prompt is .*, not 3"),
        (np.array(3), "a prompt is"),
        ({"text": "a"}, "a prompt is .*, not {'text': 'a'}"),
    ],
)
def test_what_is_no_prompt_is_named_with_its_place(prompt: Any, named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        is_single(prompt)


def test_an_unknown_option_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="unknown option 'modle'"):
        Engine(modle="x")  # type: ignore[call-arg]


def _until(condition: object, seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.002)


@pytest.mark.parametrize(
    "prompt", [[1, "a"], [2**70, 1], [1, None], [1, float("nan")], [1, 1.7], [-1], 5, [None, 1], [1.5]], ids=repr
)
def test_a_prompt_of_the_wrong_types_is_refused_and_the_engine_lives(engine: Engine, prompt: object) -> None:
    with pytest.raises(InvalidRequest):
        engine.generate(prompt)
    assert engine.generate("hello").text == "hello"


def test_ids_of_scores_and_prefixes_are_checked_by_the_caller(engine: Engine) -> None:
    with pytest.raises(InvalidRequest):
        engine.score("a", [[2**70]])
    with pytest.raises(InvalidRequest):
        asyncio.run(engine.warm_prefix((2**70,)))


def test_ids_may_come_in_arrays(engine: Engine) -> None:
    assert engine.generate(np.array([104, 105])).text == "hi"
    assert engine.generate([np.int64(104), np.int32(105)]).text == "hi"
    assert [o.text for o in engine.generate(np.array([[104], [105]]))] == ["h", "i"]


def test_an_unexpected_error_in_one_command_refuses_that_command_only() -> None:
    class Broken(ScriptedCore):
        def add(self, request: object) -> None:
            if request.prompt == (98,):  # type: ignore[attr-defined]
                raise KeyError("surprise")
            super().add(request)  # type: ignore[arg-type]

    with scripted_engine(core=Broken()) as engine:
        with pytest.raises(SgliteError, match="surprise"):
            engine.generate("b")
        assert engine.generate("c").text == "c"


def test_of_a_list_only_the_prompt_that_cannot_be_taken_fails(engine: Engine) -> None:
    bad = {"stop_regex": "(" * 100 + "a" + ")" * 100}
    answers = engine.generate(["a", "b"], [None, bad], on_error="return")
    assert answers[0].text == "a"
    assert answers[1].error.type == "InvalidRequest"
    with pytest.raises(InvalidRequest, match="deep"):
        engine.generate("b", bad)


def test_a_forked_child_is_told_that_the_engine_is_not_its_own(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getpid", lambda: -1)
    with pytest.raises(EngineDead, match="another process"):
        engine.generate("a")


@pytest.mark.parametrize(
    "values",
    [
        {"stop": (5,)}, {"stop": 5}, {"max_tokens": 3.5}, {"n": 2.0}, {"n": None}, {"top_k": "3"}, {"top_k": 2**70},
        {"seed": 1.5}, {"logit_bias": {"5": 1.0}}, {"logit_bias": {5: "1"}}, {"stop_token_ids": ("a",)},
        {"logprobs": 1.5}, {"temperature": "1"}, {"presence_penalty": None}, {"ignore_eos": "no"},
    ],
    ids=repr,
)  # fmt: skip
def test_sampling_parameters_of_the_wrong_type_are_refused_by_name(values: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**values)  # type: ignore[arg-type]
    assert caught.value.param == next(iter(values))


def test_sampling_parameters_take_values_that_mean_the_same() -> None:
    params = SamplingParams(stop="ab", max_tokens=np.int64(3), temperature=np.float32(0.5), stop_token_ids=[1])
    assert params == SamplingParams(stop=("ab",), max_tokens=3, temperature=0.5, stop_token_ids=(1,))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"priority": "x"}, "priority"),
        ({"priority": 1.5}, "priority"),
        ({"priority": 1 << 80}, "priority"),
        ({"request_id": 7}, "request_id"),
        ({"deadline": "soon"}, "deadline"),
        ({"deadline": float("nan")}, "deadline"),
        ({"request_id": "\ud800"}, "request_id"),
        ({"namespace": "a\udfff"}, "namespace"),
        ({"program": ProgramRef(program_id="p", arrival=float("inf"))}, "program.arrival"),
        ({"namespace": None}, "namespace"),
        ({"stream": 1}, "stream"),
        ({"heal": "yes"}, "heal"),
        ({"hold": []}, "hold"),
        ({"truncate_prompt": "no"}, "truncate_prompt"),
        ({"close_on_budget": 0.5}, "close_on_budget"),
        ({"jump_forward": None}, "jump_forward"),
        ({"think_budget": "8"}, "think_budget"),
        ({"continue_from": 3}, "continue_from"),
        ({"sampling_params": {"max_tokens": 3}}, "sampling_params"),
        ({"sampling_params": SamplingParams(stop=("\ud800",))}, "stop"),
        ({"grammar": "[a]"}, "grammar"),
        ({"grammar": GrammarSpec(kind="nothing", source="a")}, "grammar.kind"),
        ({"grammar": GrammarSpec(kind="regex", source=b"a")}, "grammar.source"),
        ({"program": "p"}, "program"),
        ({"program": ProgramRef(program_id="p", siblings="two")}, "program.siblings"),
        ({"program": ProgramRef(program_id=3)}, "program.program_id"),
        ({"grammar_after": ("x",)}, "grammar_after"),
        ({"grammar_after": 4}, "grammar_after"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ["a"]}, "prompt"),
    ],
)
async def test_every_field_of_a_hand_built_request_is_checked(engine: Engine, fields: dict, param: str) -> None:
    request = GenerateRequest(**{"request_id": "hand", "prompt": (1, 2), **fields})
    with pytest.raises(InvalidRequest) as refused:
        async for _ in engine.stream_request(request):
            pass
    assert refused.value.param == param
    assert engine.generate("ab", {"max_tokens": 2}).text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"continuations": 5}, "continuations"),
        ({"continuations": ("ab",)}, "continuations"),
        ({"continuations": ((1.5,),)}, "continuations"),
        ({"priority": None}, "priority"),
        ({"namespace": 3}, "namespace"),
        ({"request_id": None}, "request_id"),
    ],
)
async def test_every_field_of_a_hand_built_score_is_checked(engine: Engine, fields: dict, param: str) -> None:
    request = ScoreRequest(**{"request_id": "hand", "prompt": (1, 2), "continuations": ((1,),), **fields})
    with pytest.raises(InvalidRequest) as refused:
        await engine.score_request(request)
    assert refused.value.param == param
    assert engine.alive


async def test_numbers_of_numpy_are_taken_in_a_hand_built_request(engine: Engine) -> None:
    request = GenerateRequest(
        request_id="numpy", prompt=tuple(np.array([65, 66])), priority=np.int64(3), think_budget=np.int32(4)
    )
    assert [o async for o in engine.stream_request(request)][-1].finished


async def test_what_is_no_request_is_refused(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="GenerateRequest"):
        await engine.score_request({"prompt": "a"})  # type: ignore[arg-type]


async def test_other_calls_check_what_they_are_given_too(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="grammar"):
        await engine.compile_grammar("[a]")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="source"):
        await engine.compile_grammar(GrammarSpec(kind="regex", source=3))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="lease_s"):
        await engine.warm_prefix((1, 2), lease_s="long")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="lease_s"):
        await engine.warm_prefix((1, 2), lease_s=float("nan"))
    with pytest.raises(InvalidRequest, match="namespace"):
        await engine.warm_prefix((1, 2), namespace=1)  # type: ignore[arg-type]
    for call in (engine.abort, engine.release):
        with pytest.raises(InvalidRequest, match="request_id"):
            await call(7)  # type: ignore[arg-type]
    for call in (engine.abort, engine.release, engine.end_program):
        with pytest.raises(InvalidRequest, match="lone surrogate"):
            await call("\ud800")
    assert (await engine.generate_async("ab", {"max_tokens": 2})).text


async def test_whatever_a_request_is_made_of_what_is_sent_of_it_can_be_read(engine: Engine) -> None:
    odd: list[Any] = [2**70, "\ud800", {"\ud800": 1}, np.float32(1.5), np.array([1, 2]), range(3), (2**70,), object()]
    kinds = (GenerateRequest, ScoreRequest, SamplingParams, ProgramRef, GrammarSpec)
    sent = 0
    for kind, value in itertools.product(kinds, odd):
        for field in msgspec.structs.fields(kind):
            if field.name == "prompt":  # text is the tokenizer's business
                continue
            try:
                request = _holding(kind, field.name, value)
                command = engine._registered(request, engine._front.mailboxes.sink())
            except InvalidRequest:
                continue
            m.decode_commands(m.encode([command]))
            sent += 1
    assert sent


def _holding(kind: type, field: str, value: Any) -> GenerateRequest | ScoreRequest:
    """A request that has this value in this field of itself or of a part."""
    score: dict[str, Any] = {"request_id": uuid.uuid4().hex, "prompt": (1, 2), "continuations": ((1,),)}
    parts: dict[str, Any] = {"request_id": uuid.uuid4().hex, "prompt": (1, 2), "sampling_params": SamplingParams()}
    if kind is ScoreRequest:
        return ScoreRequest(**{**score, field: value})
    if kind is SamplingParams:
        parts["sampling_params"] = SamplingParams(**{field: value})
    elif kind is ProgramRef:
        parts["program"] = ProgramRef(**{"program_id": "p", field: value})
    elif kind is GrammarSpec:
        parts["grammar"] = GrammarSpec(**{"kind": "regex", "source": "a", field: value})
    else:
        parts[field] = value
    return GenerateRequest(**parts)


def test_an_engine_that_nobody_asks_may_rest_until_it_has_prepared_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglite.runtime.async_engine.loop.REST_AFTER_S", 0.01)
    core = ScriptedCore()
    core.wanted_rests = 5
    with scripted_engine(core=core):
        deadline = time.monotonic() + 5
        while core.rests < 5 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        assert core.rests == 5
