from __future__ import annotations

import pytest

from sglite.errors import GrammarTimeout, InvalidGrammar
from sglite.protocol import FinishReason
from tests.fakes.executor import scripted_greedy
from tests.fakes.matcher import BatchLoopFiller, TextsMatcher, choice
from tests.fakes.tokenizer import EOS, EOT
from tests.runtime.harness import VOCAB, Harness, greedy

BOTH_LOOPS = pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
KEYS = choice('{"name": "Ada", "age": 3}', '{"name": "Bob", "age": 41}', '{"none": 0}')


@BOTH_LOOPS
def test_the_output_is_in_the_language_and_ends_with_it(overlap: bool) -> None:  # R25
    output = Harness(overlap=overlap).generate("say", grammar=choice("1"), logit_bias={120: 100.0})
    assert (output.text, output.finish_reason) == ("1", FinishReason.GRAMMAR)
    assert output.coverage is not None


@BOTH_LOOPS
def test_a_longer_text_may_follow_a_complete_one(overlap: bool) -> None:
    both = choice("ab", "abcd")
    short = Harness(overlap=overlap).generate("say", grammar=both, logit_bias={EOT: 100.0})
    assert (short.text, short.finish_reason, short.matched_stop) == ("ab", FinishReason.STOP, EOT)
    long = Harness(overlap=overlap).generate("say", grammar=both, logit_bias={ord("c"): 100.0})
    assert (long.text, long.finish_reason) == ("abcd", FinishReason.GRAMMAR)


@BOTH_LOOPS
@pytest.mark.parametrize("page_size", [1, 16])
def test_forced_text_is_the_same_with_and_without_jumping(overlap: bool, page_size: int) -> None:  # R79, R81
    for prompt in ("a", "bb", "ccc", "d" * 20):
        harness = Harness(overlap=overlap, page_size=page_size)
        slow = harness.generate(prompt, grammar=KEYS, jump_forward=False)
        steps = harness.core.metrics.steps
        fast = harness.generate(prompt, grammar=KEYS)
        assert fast.token_ids == slow.token_ids
        assert fast.usage.prompt_tokens == slow.usage.prompt_tokens == len(prompt)
        assert fast.usage.completion_tokens == slow.usage.completion_tokens == len(fast.token_ids)
        assert slow.usage.forced_tokens == 0
        assert fast.usage.forced_tokens >= len(fast.token_ids) - 4
        assert harness.core.metrics.steps - steps <= 5


@BOTH_LOOPS
def test_a_wholly_forced_output_needs_no_step(overlap: bool) -> None:
    harness = Harness(overlap=overlap)
    output = harness.generate("say", grammar=choice("constant"))
    assert output.text == "constant"
    assert harness.core.metrics.steps == 0
    assert output.usage.forced_tokens == output.usage.completion_tokens == 8


@BOTH_LOOPS
def test_cached_tokens_are_counted_where_the_answer_begins_with_forced_text(overlap: bool) -> None:
    harness = Harness(overlap=overlap)
    forced_start = choice('{"a": 1}', '{"a": 2}')
    assert harness.generate("a common prompt", grammar=forced_start).usage.cached_tokens == 0
    again = harness.generate("a common prompt", grammar=forced_start)
    assert again.usage.forced_tokens > 0
    assert again.usage.cached_tokens == len("a common prompt")


@BOTH_LOOPS
def test_forced_text_counts_against_max_tokens(overlap: bool) -> None:
    output = Harness(overlap=overlap).generate("say", grammar=choice("constant"), max_tokens=5)
    assert (output.text, output.finish_reason) == ("const", FinishReason.LENGTH)


@BOTH_LOOPS
def test_rows_with_and_without_a_grammar_do_not_disturb_each_other(overlap: bool) -> None:  # R64, R65
    harness = Harness(overlap=overlap)
    free = [harness.add(f"free {i}", max_tokens=25, ignore_eos=True) for i in range(4)]
    bound = [harness.add(f"bound {i}", grammar=KEYS) for i in range(12)]
    harness.run()
    for i, request_id in enumerate(free):
        assert list(harness.output(request_id).token_ids) == greedy(f"free {i}", 25)
    for i, request_id in enumerate(bound):
        assert harness.output(request_id).text == Harness().generate(f"bound {i}", grammar=KEYS).text


@BOTH_LOOPS
def test_matchers_that_advance_together_give_the_same(overlap: bool) -> None:
    filler = BatchLoopFiller()
    harness = Harness(overlap=overlap, filler=filler)
    harness.grammars.make = Refusing
    bad = harness.add("bad", grammar=KEYS, jump_forward=False)
    harness.grammars.make = TextsMatcher
    own_stop = harness.add("bound", grammar=choice("a!", "a?c"), stop_token_ids=(33,), logit_bias={33: 100.0})
    bound = [harness.add(f"bound {i}", grammar=KEYS, jump_forward=i % 2 == 0) for i in range(6)]
    harness.run()
    assert filler.advances > 0
    assert harness.output(bad).error.type == "GrammarViolation"
    assert harness.output(own_stop).text == "a?c"
    for i, request_id in enumerate(bound):
        assert harness.output(request_id).text == Harness().generate(f"bound {i}", grammar=KEYS).text


def test_min_tokens_never_masks_the_grammar_s_end() -> None:  # R29
    output = Harness().generate("say", grammar=choice("1"), min_tokens=64, max_tokens=70, jump_forward=False)
    assert (output.text, output.finish_reason) == ("1", FinishReason.GRAMMAR)


def test_ignore_eos_does_not_outlive_the_grammar() -> None:
    output = Harness().generate("say", grammar=choice("ab", "abc"), ignore_eos=True, logit_bias={EOS: 99.0})
    assert (output.text, output.finish_reason) == ("ab", FinishReason.STOP)


def test_own_stop_ids_are_legal_only_where_the_text_is_complete() -> None:  # R26
    spec = choice("a!", "a!b", "a?c")
    bias = {ord("!"): 100.0}
    output = Harness().generate("say", grammar=spec, stop_token_ids=(ord("!"),), logit_bias=bias)
    assert output.text == "a?c"  # "!" inside the text would have cut it
    output = Harness().generate("say", grammar=choice("a", "ab"), stop_token_ids=(ord("!"),), logit_bias=bias)
    assert (output.text, output.matched_stop) == ("a", ord("!"))


def test_logprobs_with_a_grammar_are_finite() -> None:  # R69
    output = Harness().generate("say", grammar=choice("xyz"), logprobs=5)
    assert [p.token_id for p in output.logprobs] == list(b"xyz")
    assert all(p.logprob > -1e5 for p in output.logprobs)


# -- waiting for a grammar


@BOTH_LOOPS
def test_a_compile_in_flight_delays_nobody_else(overlap: bool) -> None:
    harness = Harness(overlap=overlap)
    woken: list[bool] = []
    harness.core.set_waker(lambda: woken.append(True))
    harness.grammars.hold = True
    waiting = harness.add("say", grammar=choice("late"))
    assert not harness.core.has_work
    free = harness.add("free", max_tokens=3, ignore_eos=True)
    harness.run()
    assert harness.output(free).finished
    assert harness.core.metrics.waiting_grammar == 1
    assert not woken
    harness.grammars.release()
    assert woken
    assert harness.core.has_work
    harness.run()
    assert harness.output(waiting).text == "late"


@pytest.mark.parametrize("error", [InvalidGrammar("no"), GrammarTimeout("slow"), ValueError("from a library")])
def test_a_failing_compile_ends_one_request(error: Exception) -> None:  # R35, R39
    harness = Harness()
    harness.grammars.error = error
    bad = harness.add("say", grammar=choice("x"), n=2)
    good = harness.add("free", max_tokens=3, ignore_eos=True)
    harness.run()
    for index in range(2):
        assert harness.output(bad, index).finish_reason is FinishReason.ERROR
        assert str(error) in harness.output(bad, index).error.message
    assert list(harness.output(good).token_ids) == greedy("free", 3)


def test_an_aborted_request_does_not_come_back_with_its_grammar() -> None:
    harness = Harness()
    harness.grammars.hold = True
    request_id = harness.add("say", grammar=choice("x"))
    harness.core.abort(request_id)
    harness.grammars.release()
    harness.run()
    assert harness.output(request_id).finish_reason is FinishReason.ABORT
    assert len(harness.pieces(request_id)) == 1


# -- matchers that fail


class Refusing(TextsMatcher):
    def accept(self, token_ids: object) -> int:
        return 0


class Empty(TextsMatcher):
    def allowed(self) -> set[int]:
        return set() if len(self._taken) == 2 else super().allowed()


@BOTH_LOOPS
@pytest.mark.parametrize("make", [Refusing, Empty])
def test_a_refused_token_or_an_empty_mask_ends_one_request(overlap: bool, make: type[TextsMatcher]) -> None:  # R47
    harness = Harness(overlap=overlap)
    free = harness.add("free", max_tokens=9, ignore_eos=True)
    harness.grammars.make = make
    bad = harness.add("say", grammar=choice("abcd", "xbcd"), jump_forward=False)
    harness.grammars.make = TextsMatcher
    good = harness.add("say", grammar=choice("abcd", "xbcd"))
    harness.run()
    assert harness.output(bad).error.type == "GrammarViolation"
    assert harness.output(bad).finish_reason is FinishReason.ERROR
    assert harness.output(good).finish_reason is FinishReason.GRAMMAR
    assert list(harness.output(free).token_ids) == greedy("free", 9)


class Raising(TextsMatcher):
    """A library that raises what nobody expects."""

    when = "accept"

    def accept(self, token_ids: object) -> int:
        if self.when == "accept":
            raise ValueError("panicked")
        return super().accept(token_ids)  # type: ignore[arg-type]

    def fill(self, row: object) -> None:
        if self.when == "fill":
            raise ValueError("panicked")
        super().fill(row)  # type: ignore[arg-type]

    def forced(self) -> list[int]:
        if self.when == "forced":
            raise ValueError("panicked")
        return super().forced()


@BOTH_LOOPS
@pytest.mark.parametrize("when", ["accept", "fill", "forced"])
def test_a_grammar_engine_that_raises_ends_one_request(
    overlap: bool, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Raising, "when", when)
    harness = Harness(overlap=overlap)
    harness.grammars.make = Raising
    bad = harness.add("bad", grammar=choice("abcd", "xbcd"))
    harness.grammars.make = TextsMatcher
    good = harness.add("good", grammar=KEYS)
    free = harness.add("free", max_tokens=9, ignore_eos=True)
    harness.run()
    assert "panicked" in harness.output(bad).error.message
    assert harness.output(good).text == Harness().generate("good", grammar=KEYS).text
    assert list(harness.output(free).token_ids) == greedy("free", 9)


@BOTH_LOOPS
def test_a_token_outside_the_mask_ends_one_request(overlap: bool) -> None:  # R47
    harness = Harness(overlap=overlap)
    harness.executor.force_token[2] = 1
    bad = harness.add("say", grammar=choice("abcd", "axcd"), jump_forward=False)
    free = harness.add("free", max_tokens=9, ignore_eos=True)
    harness.run()
    assert harness.output(bad).error.type == "GrammarViolation"
    assert list(harness.output(free).token_ids) == greedy("free", 9)


def test_what_the_mask_could_not_enforce_is_reported() -> None:
    harness = Harness()
    harness.grammars.complaint = "too short"
    output = harness.generate("say", grammar=choice("x"))
    assert (output.text, output.finish_reason) == ("x", FinishReason.SCHEMA_VIOLATION)
    assert output.reason == "too short"
    assert not output.coverage.exact


def test_close_on_budget_is_refused_where_the_grammar_cannot() -> None:
    harness = Harness()
    request_id = harness.add("say", grammar=choice("abc"), close_on_budget=True, max_tokens=2)
    harness.run()
    assert harness.output(request_id).error.param == "close_on_budget"


# -- healing


@BOTH_LOOPS
@pytest.mark.parametrize("n", [1, 2])
def test_a_healed_token_is_given_back_and_not_shown_twice(overlap: bool, n: int) -> None:
    harness = Harness(overlap=overlap)
    request_id = harness.add("hello wor", heal=True, max_tokens=5, ignore_eos=True, n=n)
    harness.run()
    output = harness.output(request_id)
    assert bytes(output.prompt_token_ids) == b"hello wo"
    assert output.token_ids[0] == ord("r")
    assert list(output.token_ids) == [ord("r"), *scripted_greedy(list(b"hello wor"), 5, VOCAB)]
    shown = bytes(t for t in output.token_ids[1:] if t < 256).decode(errors="replace")
    assert output.text == shown


@BOTH_LOOPS
def test_one_token_after_a_healed_prompt_is_a_new_one(overlap: bool) -> None:
    harness = Harness(overlap=overlap)
    request_id = harness.add("hello wor", heal=True, max_tokens=1, ignore_eos=True)
    harness.run()
    output = harness.output(request_id)
    assert list(output.token_ids) == [ord("r"), *scripted_greedy(list(b"hello wor"), 1, VOCAB)]
    assert output.finish_reason is FinishReason.LENGTH


def test_a_healed_prompt_goes_on_with_its_grammar() -> None:
    output = Harness().generate('say "', heal=True, grammar=choice("yes", "no"))
    assert output.text in ("yes", "no")
    assert output.token_ids[0] == ord('"')


def test_a_special_token_is_not_healed() -> None:
    output = Harness().generate([104, 105, EOT], heal=True, max_tokens=2)
    assert output.prompt_token_ids == (104, 105, EOT)


# -- a grammar after a marker


@BOTH_LOOPS
def test_a_grammar_may_begin_after_a_marker(overlap: bool) -> None:
    marker = (7, 8)
    harness = Harness(overlap=overlap)
    request_id = harness.add("think", grammar=choice("yes", "no"), grammar_after=marker, think_budget=10)
    harness.run()
    output = harness.output(request_id)
    ids = list(output.token_ids)
    assert ids[10:12] == [7, 8]
    assert bytes(ids[12:]).decode() in ("yes", "no")
    assert not set(ids) & {EOS, EOT}
    assert output.finish_reason is FinishReason.GRAMMAR
    slow = Harness(overlap=overlap).generate(
        "think", grammar=choice("yes", "no"), grammar_after=marker, think_budget=10, jump_forward=False
    )
    assert list(slow.token_ids) == ids


def test_validation_reads_what_follows_the_marker() -> None:
    harness = Harness()
    seen: list[str] = []
    harness.grammars.complaint = "wrong"
    request_id = harness.add("think", grammar=choice("yes"), grammar_after=(7,), think_budget=3)
    request = harness.core._scheduler.waiting.ordered(0.0)[0]
    request.grammar.validate = lambda text: seen.append(text) or "wrong"
    harness.run()
    assert harness.output(request_id).finish_reason is FinishReason.SCHEMA_VIOLATION
    assert seen == ["yes"]
