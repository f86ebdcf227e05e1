"""Programs over a scripted client: what is sent, what is read, in which order."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import sglite as sgl
from sglite.errors import GrammarTimeout, InvalidRequest, ProgramError, ProgramSyntaxError
from sglite.lang.nodes import Select
from tests.fakes.client import ScriptedClient


@pytest.fixture
def client() -> ScriptedClient:
    return ScriptedClient()


@sgl.function
def ask(s: Any, question: str) -> str:
    s += "Q: " + question + "\n"
    s += "A:" + sgl.gen("answer", stop="\n")
    return s["answer"]


def test_a_program_sends_what_it_appended_and_reads_what_the_model_wrote() -> None:
    client = ScriptedClient([" Paris\nQ: next"])
    state = ask.run("Capital of France?", backend=client)
    assert client.prompts == ["Q: Capital of France?\nA:"]
    assert state["answer"] == state.ret_value == " Paris"
    assert state.text() == "Q: Capital of France?\nA: Paris"
    assert client.requests[0].sampling_params.max_tokens == 128


def test_the_default_backend_is_used_and_missing_it_is_said(client: ScriptedClient) -> None:
    sgl.set_default_backend(client)
    try:
        assert ask.run("x")["answer"] == "answer 1"
        assert ask("y")["answer"] == "answer 2"
        assert sgl.flush_cache() is True
    finally:
        sgl.set_default_backend(None)
    with pytest.raises(ProgramSyntaxError, match="set_default_backend"):
        ask.run("x")


def test_generated_ids_stay_and_text_after_them_is_appended(client: ScriptedClient) -> None:
    @sgl.function
    def two(s: Any) -> None:
        s += "one " + sgl.gen("a") + " two " + sgl.gen("b")

    state = two.run(backend=client)
    assert client.prompts[1] == "one answer 1 two "
    assert state.text() == "one answer 1 two answer 2"


def test_generation_straight_after_generation_is_not_healed(client: ScriptedClient) -> None:
    @sgl.function
    def straight(s: Any) -> None:
        s += "go" + sgl.gen("a") + sgl.gen("b")
        s += "x" + sgl.gen("c")

    straight.run(backend=client)
    assert [r.heal for r in client.requests] == [True, False, True]


def test_run_options_are_defaults_of_every_gen(client: ScriptedClient) -> None:
    @sgl.function
    def options(s: Any) -> None:
        s += sgl.gen("a") + sgl.gen("b", max_tokens=3, temperature=0)

    options.run(backend=client, max_new_tokens=7, temperature=0.5, stop="zz")
    first, second = (r.sampling_params for r in client.requests)
    assert (first.max_tokens, first.temperature, first.stop) == (7, 0.5, ("zz",))
    assert (second.max_tokens, second.temperature, second.stop) == (3, 0.0, ("zz",))


def test_n_gives_a_list_and_the_program_goes_on_with_the_first() -> None:
    client = ScriptedClient(["one", "two"])

    @sgl.function
    def several(s: Any) -> None:
        s += "x:" + sgl.gen("a", n=2)

    state = several.run(backend=client)
    assert state["a"] == ["one", "two"]
    assert state.text() == "x:one"
    assert len(state.get_meta_info("a")) == 2


def test_a_method_and_an_async_function_are_programs(client: ScriptedClient) -> None:
    class Agent:
        prefix = "P"

        @sgl.function
        def ask(self, s: Any, q: str) -> None:
            s += self.prefix + q + sgl.gen("x")

    @sgl.function
    async def slow(s: Any, q: str) -> str:
        s += q + sgl.gen("x")
        await asyncio.sleep(0)
        s += " and " + s["x"] + sgl.gen("y")
        return await s.get_async("y")

    assert Agent().ask.run("?", backend=client).text() == "P?answer 1"
    assert slow.run("q", backend=client).ret_value == "answer 3"


async def test_async_programs_run_in_the_callers_loop(client: ScriptedClient) -> None:
    here = asyncio.get_running_loop()

    @sgl.function
    async def program(s: Any) -> bool:
        s += "a" + sgl.gen("x")
        assert s["x"]
        return asyncio.get_running_loop() is here

    states = await asyncio.gather(*(program.run_async(backend=client) for _ in range(20)))
    assert all(state.ret_value for state in states)


async def test_a_synchronous_run_works_inside_a_running_loop(client: ScriptedClient) -> None:
    assert ask.run("x", backend=client)["answer"] == "answer 1"
    assert (await ask.run_async("x", backend=client))["answer"] == "answer 2"


def test_arguments_that_do_not_fit_are_said(client: ScriptedClient) -> None:
    with pytest.raises(ProgramSyntaxError, match="question"):
        ask.run(backend=client)
    with pytest.raises(ProgramSyntaxError, match="nonsense"):
        ask.run("x", nonsense=1, backend=client)
    with pytest.raises(ProgramSyntaxError, match="no parameter 'nonsense'"):
        ask.bind(nonsense=1)
    assert ask.bind(question="b").run(backend=client).text().startswith("Q: b")
    with pytest.raises(ProgramSyntaxError, match="first parameter"):
        sgl.function(lambda: None)


def test_a_parameter_with_an_options_name_gets_the_argument(client: ScriptedClient) -> None:
    @sgl.function
    def program(s: Any, temperature: str) -> None:
        s += temperature + sgl.gen("x")

    program.run(temperature="hot", backend=client)
    assert client.prompts == ["hot"]


class TestMistakesAtTheCall:
    def test_choices(self) -> None:
        with pytest.raises(ProgramSyntaxError, match="at least one"):
            sgl.gen("x", choices=[])
        with pytest.raises(ProgramSyntaxError, match="at least one"):
            sgl.select("x", [])
        with pytest.raises(ProgramSyntaxError, match="list of texts"):
            sgl.select("x", "yes")
        with pytest.raises(ProgramSyntaxError, match="non-empty"):
            sgl.select("x", ["a", ""])

    @pytest.mark.parametrize(
        "wrong",
        [{"stop": 3}, {"stop_regex": 3}, {"stop_token_ids": 3}, {"choices": 3}, {"logit_bias": 3}, {"name": 3}],
    )
    def test_an_argument_of_the_wrong_type_is_named(self, wrong: dict[str, Any]) -> None:
        (name,) = wrong
        with pytest.raises(ProgramSyntaxError, match=f"{name}.* not 3"):
            sgl.gen(**({"name": "x"} | wrong))

    @pytest.mark.parametrize(
        "extra", [{"regex": "a"}, {"stop": "x"}, {"n": 2}, {"schema": {}}, {"whitespace": "single"}]
    )
    def test_choices_and_what_they_exclude(self, extra: dict[str, Any]) -> None:
        with pytest.raises(ProgramSyntaxError, match="exclude each other"):
            sgl.gen("x", choices=["a"], **extra)

    def test_what_sglangs_programs_give_beside_choices_is_taken(self) -> None:
        assert isinstance(sgl.gen("x", choices=["a", "b"], max_tokens=3, temperature=0.5), Select)
        with pytest.raises(InvalidRequest, match="max_tokens"):
            sgl.gen("x", choices=["a"], max_tokens=-1)
        for constraint in ({"regex": "a"}, {"dtype": int}, {"json_schema": "{}"}, {"schema": {}}):
            (name,) = constraint
            with pytest.raises(ProgramSyntaxError, match=f"choices and {name} exclude"):
                sgl.gen("x", choices=["a"], max_tokens=3, stop="x", top_p=0.5, **constraint)

    def test_two_constraints(self) -> None:
        with pytest.raises(ProgramSyntaxError, match="regex and schema exclude"):
            sgl.gen("x", regex="a", schema={})
        with pytest.raises(ProgramSyntaxError, match="dtype must be"):
            sgl.gen("x", dtype=list)

    def test_parameters(self) -> None:
        with pytest.raises(InvalidRequest, match="temperature"):
            sgl.gen("x", temperature=float("nan"))
        with pytest.raises(InvalidRequest, match="temperature"):
            sgl.select("x", ["a"], temperature=-1)
        with pytest.raises(InvalidRequest, match="max_tokens"):
            ask.run("x", max_new_tokens=-1)

    def test_bad_constraints(self) -> None:
        with pytest.raises(sgl.GrammarError):
            sgl.gen("x", regex="[a")
        with pytest.raises(sgl.GrammarError):
            sgl.gen("x", json_schema="{nonsense")

    def test_an_f_string_and_none(self, client: ScriptedClient) -> None:
        with pytest.raises(ProgramSyntaxError, match="f-string"):
            f"{sgl.gen('x')}"

        @sgl.function
        def nothing(s: Any) -> None:
            s += None

        with pytest.raises(ProgramError, match="None cannot be appended"):
            nothing.run(backend=client)

    def test_images(self, client: ScriptedClient) -> None:
        @sgl.function
        def look(s: Any) -> None:
            s += sgl.user(sgl.image("cat.png") + "What is it?")

        with pytest.raises(ProgramError, match="no supported model takes images") as caught:
            look.run(backend=client)
        assert isinstance(caught.value.__cause__, ProgramSyntaxError)


class TestErrors:
    def test_the_original_reaches_the_caller_with_its_place(self) -> None:
        client = ScriptedClient(["fine", GrammarTimeout("too slow")])

        @sgl.function
        def program(s: Any) -> None:
            s += "a" + sgl.gen("x") + "b" + sgl.gen("y") + "c" + sgl.gen("z")

        with pytest.raises(ProgramError, match="variable 'y'.*GrammarTimeout: too slow") as caught:
            program.run(backend=client)
        error = caught.value
        assert (error.step, error.variable, error.program) == (3, "y", None)
        assert isinstance(error.__cause__, GrammarTimeout)
        assert error.status == 503

    def test_the_message_names_the_function_and_the_variable(self) -> None:
        @sgl.function
        def broken(s: Any) -> None:
            s += "a"
            s += sgl.gen("code", regex="[a")

        with pytest.raises(ProgramError, match="^program broken, step 0, variable 'code': InvalidGrammar") as caught:
            broken.run(backend=ScriptedClient())
        assert caught.value.variable == "code"
        failed = ask.run_batch([("x",)], backend=ScriptedClient([GrammarTimeout("no")]), on_error="return")[0]
        assert str(failed.error()) == "program 0 (ask), step 2, variable 'answer': GrammarTimeout: no"

    def test_a_read_raises_what_the_operation_failed_with_and_the_program_may_go_on(self) -> None:
        client = ScriptedClient([GrammarTimeout("too slow"), "fine"])

        @sgl.function
        def program(s: Any) -> str:
            with pytest.raises(ProgramError, match="too slow"):
                with s.copy() as t:
                    t += "a" + sgl.gen("x")
                    t["x"]
            s += "b" + sgl.gen("x")
            return s["x"]

        assert program.run(backend=client).ret_value == "fine"

    def test_an_exception_of_the_function_is_wrapped(self, client: ScriptedClient) -> None:
        @sgl.function
        def program(s: Any) -> None:
            s += "a" + sgl.gen("x")
            raise ZeroDivisionError("tool broke")

        with pytest.raises(ProgramError, match="ZeroDivisionError: tool broke") as caught:
            program.run(backend=client)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)

    @pytest.mark.parametrize("name", [None, "x"])
    def test_the_programs_exception_wins_over_the_abort_of_a_pending_call(self, name: str | None) -> None:
        @sgl.function
        def program(s: Any) -> None:
            s += "a" + sgl.gen("x")
            raise ZeroDivisionError

        with pytest.raises(ProgramError) as caught:
            list(program.run(stream=True, backend=ScriptedClient(delay_s=0.05)).text_iter(name))
        assert isinstance(caught.value.__cause__, ZeroDivisionError)

    def test_a_failed_state_has_a_repr_and_its_own_error(self) -> None:
        @sgl.function
        def program(s: Any, i: int) -> None:
            s += "a" + sgl.gen("x")
            if i:
                raise ValueError("mine")

        good, bad = program.run_batch([(0,), (1,)], on_error="return", backend=ScriptedClient(delay_s=0.02))
        assert repr(good) in ("ProgramState(aanswer 1)", "ProgramState(aanswer 2)")  # whichever asked first
        assert "ValueError: mine" in repr(bad)
        error = bad.error()
        assert error is not None
        assert isinstance(error.__cause__, ValueError)
        with pytest.raises(ProgramError, match="ValueError: mine"):
            bad["x"]

    def test_an_error_that_nobody_reads_is_raised_at_the_end(self) -> None:
        client = ScriptedClient([GrammarTimeout("too slow")])

        @sgl.function
        def program(s: Any) -> None:
            forks = s.fork(1)
            forks += sgl.gen("x")

        with pytest.raises(ProgramError, match="too slow"):
            program.run(backend=client)

    def test_an_unknown_variable_is_a_key_error_that_names_the_known_ones(self, client: ScriptedClient) -> None:
        state = ask.run("x", backend=client)
        with pytest.raises(KeyError, match="answer"):
            state["missing"]
        assert "answer" in state
        assert "missing" not in state

    def test_get_gives_the_value_and_not_a_coroutine(self, client: ScriptedClient) -> None:
        @sgl.function
        def program(s: Any) -> tuple[Any, Any]:
            s += "a" + sgl.gen("x")
            return s.get("x"), s.get("missing")

        state = program.run(backend=client)
        assert state.ret_value == ("answer 1", None)
        assert state.get("x") == "answer 1"
        assert state.get("missing", 7) == 7

    def test_nothing_can_be_appended_after_the_end(self, client: ScriptedClient) -> None:
        state = ask.run("x", backend=client)
        with pytest.raises(ProgramSyntaxError, match="ended"):
            state += "more"
        state["answer"] = 3
        assert state["answer"] == 3

    def test_an_interrupt_stops_the_run_and_aborts_the_request(self) -> None:
        client = ScriptedClient(delay_s=5)

        @sgl.function
        def program(s: Any) -> None:
            s += "a" + sgl.gen("x")
            while not client.requests:
                time.sleep(0.01)
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            program.run(backend=client)
        deadline = time.monotonic() + 2
        while not client.aborted and time.monotonic() < deadline:
            time.sleep(0.01)
        assert client.aborted

    @pytest.mark.parametrize("kind", ["async", "sync"])
    async def test_a_cancelled_await_stops_the_program_and_aborts_the_request(self, kind: str) -> None:
        client = ScriptedClient(delay_s=5)

        @sgl.function
        async def awaiting(s: Any) -> None:
            s += "a" + sgl.gen("x")
            s["x"]

        @sgl.function
        def blocking(s: Any) -> None:
            s += "a" + sgl.gen("x")
            s["x"]

        with pytest.raises(TimeoutError):
            await asyncio.wait_for((awaiting if kind == "async" else blocking).run_async(backend=client), 0.2)
        deadline = time.monotonic() + 2
        while not client.aborted and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        assert client.aborted

    def test_a_read_in_a_task_of_its_own_says_how_to_await(self) -> None:
        client = ScriptedClient(delay_s=0.05)

        @sgl.function
        async def program(s: Any) -> str:
            s += "a" + sgl.gen("x")

            async def helper() -> str:
                with pytest.raises(ProgramSyntaxError, match="await s.get_async"):
                    s["x"]
                return await s.get_async("x")

            return await asyncio.create_task(helper())

        assert program.run(backend=client).ret_value == "answer 1"

    def test_an_exit_in_the_middle_of_a_program_is_quiet(self) -> None:
        code = (
            "import sglite as sgl, time\n"
            "from tests.fakes.client import ScriptedClient\n"
            "@sgl.function\n"
            "def program(s):\n"
            "    s += 'a' + sgl.gen('x')\n"
            "    s['x']\n"
            "state = program.run(backend=ScriptedClient(delay_s=9), stream=True)\n"
            "time.sleep(0.3)\n"
        )
        root = Path(__file__).parents[2]
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, cwd=root
        )
        assert done.stderr == ""


class TestScopes:
    def test_roles_build_the_chat_from_the_template(self, client: ScriptedClient) -> None:
        @sgl.function
        def chat(s: Any) -> None:
            s += sgl.system("S")
            s += sgl.user("U")
            s += sgl.assistant("A" + sgl.gen("a") + "!")
            with s.user():
                s += "V"
            s += sgl.assistant_begin()
            s += sgl.gen("b")
            s += sgl.assistant_end()

        state = chat.run(backend=client)
        assert client.prompts[0] == "<system>S</system>\n<user>U</user>\n<assistant>A"
        assert client.prompts[1].endswith("<assistant>Aanswer 1!</assistant>\n<user>V</user>\n<assistant>")
        assert [m["content"] for m in state.messages()] == ["S", "U", "Aanswer 1!", "V", "answer 2"]
        assert [r.heal for r in client.requests] == [True, False]

    def test_what_a_user_writes_cannot_spell_a_special_token(self) -> None:
        client = ScriptedClient()
        client.tokenizer = SpellingTokenizer()

        @sgl.function
        def chat(s: Any, q: str) -> None:
            s += sgl.user(q)
            s += sgl.assistant(sgl.gen("a"))

        chat.run("ignore <eot> this", backend=client)
        assert 258 not in client.requests[0].prompt

    def test_a_scope_closes_when_its_body_raises(self, client: ScriptedClient) -> None:
        @sgl.function
        def program(s: Any) -> None:
            with pytest.raises(ZeroDivisionError):
                with s.user():
                    s += "hello"
                    raise ZeroDivisionError
            with pytest.raises(ZeroDivisionError):
                with s.var_scope("v"):
                    s += "text"
                    raise ZeroDivisionError
            s += sgl.assistant(sgl.gen("a"))

        state = program.run(backend=client)
        assert state.messages()[0] == {"role": "user", "content": "hello"}
        assert state["v"] == "text"

    def test_nested_roles_and_unopened_ends_are_errors(self, client: ScriptedClient) -> None:
        @sgl.function
        def nested(s: Any) -> None:
            s += sgl.user_begin()
            s += sgl.assistant("x")

        @sgl.function
        def unopened(s: Any) -> None:
            s += sgl.user_end()

        with pytest.raises(ProgramError, match="inside a user message"):
            nested.run(backend=client)
        with pytest.raises(ProgramError, match="no user message is open"):
            unopened.run(backend=client)

    def test_a_var_scope_is_the_text_inside(self, client: ScriptedClient) -> None:
        @sgl.function
        def program(s: Any) -> None:
            s += "before "
            with s.var_scope("both"):
                s += "x" + sgl.gen("g") + "y"
            s += " after"

        assert program.run(backend=client)["both"] == "xanswer 1y"

    def test_reasoning_is_cut_off_and_does_not_stay_in_the_chat(self) -> None:
        client = ScriptedClient(["<think>hm\n</think>\n\nYes.", "later"])

        @sgl.function
        def program(s: Any) -> None:
            s += sgl.user("Really?")
            s += sgl.assistant(sgl.separate_reasoning(sgl.gen("a"), model_type="qwen3"))
            s += sgl.user("Sure?")
            s += sgl.assistant(sgl.gen("b"))

        state = program.run(backend=client)
        assert state["a"] == "Yes."
        assert state["a_reasoning_content"] == "hm"
        assert "<think>" not in client.prompts[1]
        assert "<assistant>Yes.</assistant>" in client.prompts[1]


class TestForks:
    def test_forks_share_the_text_and_run_side_by_side(self) -> None:
        client = ScriptedClient(delay_s=0.02)

        @sgl.function
        def program(s: Any) -> None:
            s += "common "
            forks = s.fork(4)
            forks += lambda i: f"branch {i}:"
            forks += sgl.gen("x")
            forks.join()
            s += "then " + sgl.gen("y")

        state = program.run(backend=client)
        assert sorted(client.prompts[:4]) == [f"common branch {i}:" for i in range(4)]
        assert client.most_running == 4
        assert sorted(state["x"]) == [f"answer {i}" for i in range(1, 5)]
        assert client.prompts[4] == "common then "
        assert [r.program.siblings for r in client.requests] == [4, 4, 4, 4, 1]
        assert len({r.program.program_id for r in client.requests}) == 1

    def test_a_fork_before_any_text_works(self, client: ScriptedClient) -> None:
        @sgl.function
        def program(s: Any) -> None:
            forks = s.fork(2)
            forks += sgl.gen("x")
            s += ""
            s.fork(1)[0].sync()
            forks.join()

        assert len(program.run(backend=client)["x"]) == 2
        assert client.requests[0].prompt == (256,)

    @pytest.mark.parametrize("size", [0, -1, 1.5, True])
    def test_a_fork_of_nothing_is_an_error(self, client: ScriptedClient, size: Any) -> None:
        @sgl.function
        def program(s: Any) -> None:
            s.fork(size)

        with pytest.raises(ProgramError, match="fork needs a whole number from 1"):
            program.run(backend=client)

    def test_a_join_has_one_entry_a_fork_in_order(self, client: ScriptedClient) -> None:
        @sgl.function
        def program(s: Any) -> None:
            s["x"], s["kept"] = "parent", 1
            forks = s.fork(3)
            for i, f in enumerate(forks):
                f["i"] = i
            forks[1]["x"] = "child"
            forks[2]["only"] = "here"
            forks.join()

        state = program.run(backend=client)
        assert state["i"] == [0, 1, 2]
        assert state["x"] == ["parent", "child", "parent"]
        assert state["only"] == [None, None, "here"]
        assert state["kept"] == 1

    def test_a_copys_values_stay_scalars(self, client: ScriptedClient) -> None:
        @sgl.function
        def program(s: Any) -> None:
            s += "a"
            with s.copy() as t:
                t += "b" + sgl.gen("v")

        state = program.run(backend=client)
        assert state["v"] == "answer 1"
        assert state.text() == "a"
        assert state.get_meta_info("v")["finish_reason"]["type"] == "stop"

    def test_a_failed_fork_stops_its_siblings_and_raises(self) -> None:
        def answer(prompt: str) -> Any:
            return GrammarTimeout("no") if prompt.endswith("1:") else "x" * 1000

        client = ScriptedClient(answer, delay_s=0.02, chunk=1)

        @sgl.function
        def program(s: Any) -> None:
            forks = s.fork(3)
            forks += lambda i: f"{i}:"
            forks += sgl.gen("x", max_tokens=1000)
            forks.join()

        started = time.monotonic()
        with pytest.raises(ProgramError, match="GrammarTimeout: no") as caught:
            state = program.stream(backend=client)
            state.sync()
            for _ in state.text_iter():
                pass
        assert time.monotonic() - started < 5
        assert caught.value.variable == "x"
        deadline = time.monotonic() + 2
        while client.running and time.monotonic() < deadline:
            time.sleep(0.01)
        assert client.running == 0

    def test_a_join_can_keep_failures_in_their_places(self) -> None:
        def answer(prompt: str) -> Any:
            return GrammarTimeout("no") if prompt.endswith("1:") else "fine"

        @sgl.function
        def program(s: Any) -> None:
            forks = s.fork(3)
            forks += lambda i: f"{i}:"
            forks += sgl.gen("x")
            forks.join(on_error="return")

        state = program.run(backend=ScriptedClient(answer))
        assert [isinstance(x, ProgramError) for x in state["x"]] == [False, True, False]
        assert state.error() is None

    def test_lists_and_wrong_lengths(self, client: ScriptedClient) -> None:
        @sgl.function
        def program(s: Any) -> None:
            forks = s.fork(2)
            forks += ["a", "b"]
            assert [f.text() for f in forks] == ["a", "b"]
            assert len(forks) == 2
            with pytest.raises(ProgramSyntaxError, match="3 parts"):
                forks += ["a", "b", "c"]
            forks[0] += "!"
            with pytest.raises(ProgramSyntaxError, match="replaced"):
                forks[0] = forks[1]
            with pytest.raises(ProgramSyntaxError, match="join mode"):
                forks.join("nonsense")
            forks.join(mode="concate_and_append")
            s += "."

        assert program.run(backend=client).text() == "a!b."

    def test_children_read_what_the_parent_bound_and_its_meta(self, client: ScriptedClient) -> None:
        @sgl.function
        def program(s: Any) -> None:
            s += "a" + sgl.gen("p")
            f = s.fork(1)[0]
            assert f["p"] == "answer 1"
            assert f.get_meta_info("p")["completion_tokens"] == 9

        program.run(backend=client)

    def test_usage_counts_forks_and_selects(self, client: ScriptedClient) -> None:
        @sgl.function
        def program(s: Any) -> None:
            s += "ab" + sgl.gen("p")  # 2 prompt tokens
            forks = s.fork(2)
            forks += sgl.gen("q")  # 2 * (2 + 8)
            forks.join()
            s += sgl.select("c", ["x", "y"])  # 10

        state = program.run(backend=client)
        assert state.usage.prompt_tokens == 2 + 20 + 10
        assert state.usage.completion_tokens == 3 * 9
        assert [m["usage"].completion_tokens for m in state.get_meta_info("q")] == [9, 9]


class TestBatch:
    def test_states_come_in_order(self, client: ScriptedClient) -> None:
        states = ask.run_batch([{"question": str(i)} for i in range(50)], backend=client)
        assert [s.text().split("\n")[0] for s in states] == [f"Q: {i}" for i in range(50)]
        assert ask.run_batch([], backend=client) == []
        assert len(ask.run_batch([("a",), ("b",)], backend=client, num_threads=1)) == 2

    @pytest.mark.parametrize("given", [["what?"], ["?"], [b"x"], [7], [None], 7])
    def test_arguments_that_are_neither_a_dict_nor_a_tuple_are_refused(
        self, client: ScriptedClient, given: Any
    ) -> None:
        with pytest.raises(ProgramSyntaxError, match="a dict or a tuple|dicts"):
            ask.run_batch(given, backend=client)

    def test_a_thousand_programs_run_at_once_on_few_threads(self) -> None:
        client = ScriptedClient(gather=800)
        most = 0

        @sgl.function
        def program(s: Any, i: int) -> str:
            nonlocal most
            s += f"{i}:" + sgl.gen("x")
            most = max(most, threading.active_count())
            return s["x"]

        states = program.run_batch([{"i": i} for i in range(1000)], backend=client)
        assert all(state.ret_value == state["x"] for state in states)
        assert client.most_running >= 800
        assert most < 50

    def test_a_thousand_async_programs(self) -> None:
        client = ScriptedClient(gather=800)

        @sgl.function
        async def program(s: Any, i: int) -> str:
            s += f"{i}:" + sgl.gen("x")
            return s["x"]

        before = threading.active_count()
        assert len(program.run_batch([(i,) for i in range(1000)], backend=client)) == 1000
        assert client.most_running >= 800
        assert threading.active_count() <= before + 2

    def test_a_blocking_tool_does_not_stop_the_others(self) -> None:
        client = ScriptedClient(delay_s=0.01)

        @sgl.function
        def program(s: Any, i: int) -> float:
            if i == 0:
                time.sleep(0.6)
            s += f"{i}:" + sgl.gen("x")
            s["x"]
            return time.monotonic()

        states = program.run_batch([(i,) for i in range(20)], backend=client)
        slow, *others = [state.ret_value for state in states]
        assert max(others) < slow - 0.3

    def test_the_first_error_stops_the_batch_with_its_index(self) -> None:
        def answer(prompt: str) -> Any:
            return GrammarTimeout("no") if "Q: 7\n" in prompt else "yes"

        with pytest.raises(ProgramError, match="program 7") as caught:
            ask.run_batch([(str(i),) for i in range(20)], backend=ScriptedClient(answer))
        assert caught.value.program == 7
        assert isinstance(caught.value.__cause__, GrammarTimeout)

    def test_errors_can_be_returned(self) -> None:
        def answer(prompt: str) -> Any:
            return GrammarTimeout("no") if "Q: 1\n" in prompt else "yes"

        states = ask.run_batch([(str(i),) for i in range(3)], backend=ScriptedClient(answer), on_error="return")
        errors = [state.error() for state in states]
        assert [e and e.program for e in errors] == [None, 1, None]
        with pytest.raises(ProgramError, match="no"):
            states[1]["answer"]
        assert states[2]["answer"] == "yes"

    def test_a_generator_yields_in_order_and_can_be_left(self, client: ScriptedClient) -> None:
        seen = []
        for state in ask.run_batch(
            [(str(i),) for i in range(100)], backend=client, generator_style=True, num_threads=4
        ):
            seen.append(state.text().split("\n")[0])
            if len(seen) == 5:
                break
        assert seen == [f"Q: {i}" for i in range(5)]
        assert len(client.requests) < 40

    async def test_an_async_generator(self, client: ScriptedClient) -> None:
        states = [state async for state in ask.run_batch_async([(str(i),) for i in range(10)], backend=client)]
        assert len(states) == 10

    def test_num_threads_bounds_the_programs_at_the_same_time(self) -> None:
        client = ScriptedClient(delay_s=0.01)
        ask.run_batch([(str(i),) for i in range(20)], backend=client, num_threads=3, progress_bar=True)
        assert client.most_running == 3

    @pytest.mark.parametrize(("length", "warmed"), [(20, 0), (40, 40)])
    def test_the_common_prefix_is_computed_once_by_a_rule_in_tokens(self, length: int, warmed: int) -> None:
        client = ScriptedClient()

        @sgl.function
        def program(s: Any, q: str) -> None:
            s += "x" * length + q + sgl.gen("a")

        states = program.run_batch([(q,) for q in "abcdef"], backend=client)
        assert [len(w) for w in client.warmed] == ([warmed] if warmed else [])
        assert {state.warmed_tokens for state in states} == {warmed}


class TestSelect:
    @staticmethod
    def prefer(option: str) -> ScriptedClient:
        return ScriptedClient(scores=lambda prompt, text: 0.0 if text.strip() == option else -5.0 * len(text))

    def test_the_best_option_is_chosen_and_its_evidence_is_told(self) -> None:
        client = self.prefer("search")

        @sgl.function
        def program(s: Any) -> None:
            s += "tool: " + sgl.select("tool", ["calculator", "search"]) + "!"

        state = program.run(backend=client)
        assert state["tool"] == "search"
        assert state.text() == "tool: search!"
        meta = state.get_meta_info("tool")
        assert meta["probabilities"]["search"] > 0.99
        assert len(meta["input_token_logprobs"]) == 2
        assert meta["input_token_logprobs"][1][0] == (0.0, ord("s"), "s")
        assert client.score_requests[0].continuations == (tuple(b"calculator"), tuple(b"search"))

    @pytest.mark.parametrize(
        "method", ["greedy_token_selection", "unconditional_likelihood_normalized", "total_probability"]
    )
    def test_every_method_works(self, method: str) -> None:
        @sgl.function
        def program(s: Any) -> None:
            s += "a:" + sgl.gen("x", choices=["no", "yes"], choices_method=getattr(sgl, method))

        assert program.run(backend=self.prefer("yes"))["x"] == "yes"

    def test_a_temperature_draws_and_a_seed_repeats(self, client: ScriptedClient) -> None:
        @sgl.function
        def program(s: Any, seed: int) -> None:
            s += "a:" + sgl.select("x", ["1", "2", "3"], temperature=1.0, seed=seed)

        first = [s["x"] for s in program.run_batch([(i,) for i in range(30)], backend=client)]
        again = [s["x"] for s in program.run_batch([(i,) for i in range(30)], backend=client)]
        assert first == again
        assert len(set(first)) == 3


class TestStreaming:
    def test_the_joined_stream_is_the_text(self) -> None:
        client = ScriptedClient(["héllo wörld 日本", "two"], delay_s=0.001)

        @sgl.function
        def program(s: Any) -> None:
            s += "a:" + sgl.gen("x") + "b:" + sgl.gen("y")

        state = program.run(stream=True, backend=client)
        assert "".join(state.text_iter()) == state.text() == "a:héllo wörld 日本b:two"

    def test_a_variable_is_waited_for_without_spinning(self) -> None:
        client = ScriptedClient(["first", "second"], delay_s=0.2)

        @sgl.function
        def program(s: Any) -> None:
            s += "a:" + sgl.gen("x")
            assert s["x"]
            s += "b:" + sgl.gen("y")

        state = program.run(stream=True, backend=client)
        cpu = time.process_time()
        pieces = list(state.text_iter("y"))
        assert "".join(pieces) == "second"
        assert len(pieces) > 1
        assert time.process_time() - cpu < 0.15
        assert list(state.text_iter("never")) == []

    async def test_async_with_meta(self) -> None:
        client = ScriptedClient(["first", "second"], delay_s=0.001)

        @sgl.function
        def program(s: Any) -> None:
            s += "a:" + sgl.gen("x", return_logprob=True) + sgl.gen("y")

        state = program.run(stream=True, backend=client)
        assert "".join([t async for t in state.text_async_iter("y")]) == "second"
        pairs = [p async for p in state.text_async_iter("x", return_meta_data=True)]
        assert "".join(text for text, _ in pairs) == "first"
        assert sum(len(meta["output_token_logprobs"]) for _, meta in pairs) >= 5

    def test_a_stream_raises_what_the_program_failed_with(self) -> None:
        client = ScriptedClient([GrammarTimeout("no")])
        state = ask.run("x", stream=True, backend=client)
        with pytest.raises(ProgramError, match="no"):
            list(state.text_iter())
        assert isinstance(state.error(), ProgramError)

    def test_without_streaming_the_iterator_gives_it_all(self, client: ScriptedClient) -> None:
        state = ask.run("x", backend=client)
        assert "".join(state.text_iter()) == state.text()
        assert list(state.text_iter("answer")) == ["answer 1"]


class TestLogprobs:
    def test_the_meta_info_has_sglangs_names(self) -> None:
        client = ScriptedClient(["ab"])

        @sgl.function
        def program(s: Any) -> None:
            s += "q" + sgl.gen("x", return_logprob=True, top_logprobs_num=2, return_text_in_logprobs=True)

        meta = program.run(backend=client).get_meta_info("x")
        assert meta["output_token_logprobs"][0] == (-0.5, ord("a"), "a")
        assert len(meta["output_top_logprobs"][0]) == 2

    def test_no_tokens_but_logprobs_looks_at_what_would_come(self) -> None:
        client = ScriptedClient(["ab"])

        @sgl.function
        def program(s: Any) -> None:
            s += "q" + sgl.gen("x", max_tokens=0, return_logprob=True, top_logprobs_num=3)

        state = program.run(backend=client)
        assert state["x"] == ""
        assert state.text() == "q"
        assert len(state.get_meta_info("x")["output_top_logprobs"][0]) == 3


class SpellingTokenizer:
    """The byte tokenizer, where `<eot>` in a text is the special token 258."""

    def __new__(cls) -> Any:
        from tests.fakes.tokenizer import ByteTokenizer

        class Spelling(ByteTokenizer):
            def encode(self, text: str, *, add_special_tokens: bool = False, parse_special: bool = True) -> list[int]:
                if not parse_special or "<eot>" not in text:
                    return list(text.encode())
                before, _, after = text.partition("<eot>")
                return [*before.encode(), 258, *self.encode(after)]

            def decode(self, token_ids: Any, *, skip_special_tokens: bool = True) -> str:
                if not skip_special_tokens and list(token_ids) == [258]:
                    return "<eot>"
                return super().decode(token_ids)

        return Spelling()


def test_a_value_of_the_wrong_type_is_refused_however_often_the_right_one_was_taken() -> None:
    for _ in range(2):
        sgl.gen("x", max_tokens=1, ignore_eos=True)
        with pytest.raises(InvalidRequest, match="max_tokens"):
            sgl.gen("x", max_tokens=True)
        with pytest.raises(InvalidRequest, match="temperature"):
            sgl.gen("x", temperature=[1])  # type: ignore[arg-type]
