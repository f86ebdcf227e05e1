from __future__ import annotations

import pytest

from sglite.errors import InvalidRequest, OutOfPages, Overloaded, PromptTooLong
from sglite.protocol import FinishReason, ProgramRef
from tests.fakes.executor import scripted_logits
from tests.fakes.matcher import choice
from tests.fakes.tokenizer import EOS, EOT, ByteTokenizer
from tests.runtime.harness import VOCAB, Harness, greedy

BOTH_LOOPS = pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
PAGE_SIZES = pytest.mark.parametrize("page_size", [1, 16])


class NoStartToken(ByteTokenizer):
    bos_token_id = None


# -- tokens


@BOTH_LOOPS
@PAGE_SIZES
def test_a_prompt_is_continued_greedily(overlap: bool, page_size: int) -> None:
    output = Harness(overlap=overlap, page_size=page_size).generate("once", max_tokens=30, ignore_eos=True)
    assert list(output.token_ids) == greedy("once", 30)
    assert output.finish_reason is FinishReason.LENGTH
    assert output.prompt_token_ids == tuple(b"once")
    assert (output.usage.prompt_tokens, output.usage.completion_tokens) == (4, 30)


@BOTH_LOOPS
@PAGE_SIZES
@pytest.mark.parametrize("step_tokens", [32, 40, 1000])
def test_batch_mates_chunks_and_sharing_change_nothing(overlap: bool, page_size: int, step_tokens: int) -> None:
    harness = Harness(overlap=overlap, page_size=page_size, max_step_tokens=step_tokens, max_rows=16)
    prompts = ["x" * n + end for n in (1, 15, 16, 17, 33, 100) for end in ("", "a", "bcd")]
    ids = [harness.add(p, max_tokens=12, ignore_eos=True) for p in prompts]
    harness.run()
    for request_id, prompt in zip(ids, prompts, strict=True):
        assert list(harness.output(request_id).token_ids) == greedy(prompt, 12)
    sizes = [b.num_tokens for b in harness.executor.batches]
    assert max(sizes) <= max(step_tokens, 16)


@BOTH_LOOPS
def test_the_same_prompt_twice_recomputes_only_its_last_token(overlap: bool) -> None:  # R106
    for page_size in (1, 16):
        harness = Harness(overlap=overlap, page_size=page_size)
        prompt = "p" * 32
        first = harness.generate(prompt, max_tokens=4, ignore_eos=True)
        before = harness.executor.computed_tokens
        second = harness.generate(prompt, max_tokens=4, ignore_eos=True)
        assert first.token_ids == second.token_ids
        assert second.usage.cached_tokens == (31 if page_size == 1 else 16)
        assert harness.executor.computed_tokens - before == 32 - second.usage.cached_tokens + 3


@BOTH_LOOPS
def test_equal_prompts_in_one_step_share_what_one_of_them_computes(overlap: bool) -> None:  # R107
    harness = Harness(overlap=overlap)
    ids = [harness.add("the very same prompt", max_tokens=6, ignore_eos=True) for _ in range(4)]
    harness.run()
    assert {harness.output(i).token_ids for i in ids} == {tuple(greedy("the very same prompt", 6))}
    assert harness.executor.batches[0].num_new.tolist() == [20, 1, 1, 1]


def test_a_prompt_that_is_being_computed_in_chunks_is_waited_for() -> None:
    harness = Harness(max_step_tokens=32)
    long = "z" * 100
    ids = [harness.add(long + end, max_tokens=2, ignore_eos=True) for end in ("1", "2", "3")]
    other = harness.add("other", max_tokens=2, ignore_eos=True)
    harness.run()
    for request_id, end in zip(ids, ("1", "2", "3"), strict=True):
        assert list(harness.output(request_id).token_ids) == greedy(long + end, 2)
    assert harness.executor.computed_tokens <= 101 + 2 + 4 * 1 + 5
    assert list(harness.output(other).token_ids) == greedy("other", 2)


def test_namespaces_share_nothing() -> None:  # R103, R105
    harness = Harness()
    harness.generate("a common prompt", max_tokens=1, namespace="A")
    assert harness.generate("a common prompt", max_tokens=1, namespace="B").usage.cached_tokens == 0
    assert harness.generate("a common prompt", max_tokens=1, namespace="A").usage.cached_tokens == 14


def test_without_the_prefix_cache_nothing_is_kept() -> None:
    harness = Harness(prefix_cache=False)
    for _ in range(2):
        output = harness.generate("a common prompt", max_tokens=3, ignore_eos=True)
        assert output.usage.cached_tokens == 0
        assert list(output.token_ids) == greedy("a common prompt", 3)
    assert harness.core.metrics.pages_free == harness.core.metrics.pages_total


def test_the_ids_of_a_prompt_are_given_back_as_they_came_and_not_made_anew() -> None:
    harness = Harness()
    prompt = tuple(b"once upon a time")
    assert harness.generate(prompt, max_tokens=2).prompt_token_ids is prompt


def test_flush_drops_what_no_running_request_uses() -> None:
    harness = Harness()
    harness.generate("gone soon", max_tokens=1)
    harness.add("stays", max_tokens=50, ignore_eos=True)
    harness.step()
    assert not harness.core.flush_cache()
    harness.run()
    assert harness.core.flush_cache()
    harness.step()
    assert harness.core.metrics.pages_free == harness.core.metrics.pages_total


def test_a_warmed_prefix_is_cached_and_outlives_others() -> None:
    harness = Harness(num_pages=64, max_model_len=64)
    harness.core.warm_prefix("w", list(b"system prompt"))
    harness.run()
    assert harness.output("w").usage.prompt_tokens == 13
    for i in range(10):
        harness.generate(f"{i} filler of the cache", max_tokens=20, ignore_eos=True)
    assert harness.core.metrics.evicted_pages > 0
    assert harness.generate("system prompt!", max_tokens=1).usage.cached_tokens == 13
    harness.core.warm_prefix("again", list(b"system prompt"))
    harness.run()
    assert harness.output("again").usage.cached_tokens == 13


# -- several completions


@BOTH_LOOPS
@PAGE_SIZES
def test_n_completions_share_the_prompt_and_differ_by_their_seeds(overlap: bool, page_size: int) -> None:
    harness = Harness(overlap=overlap, page_size=page_size)
    request_id = harness.add("s" * 32, n=3, temperature=1.0, seed=5, max_tokens=8, ignore_eos=True)
    harness.run()
    outputs = [harness.output(request_id, i) for i in range(3)]
    assert len({o.token_ids for o in outputs}) == 3
    assert harness.executor.batches[0].num_new.tolist() == ([32, 1, 1] if page_size == 1 else [32, 16, 16])
    alone = harness.generate("s" * 32, temperature=1.0, seed=5, max_tokens=8, ignore_eos=True)
    assert alone.token_ids == outputs[0].token_ids


def test_a_seed_gives_the_same_text_whoever_shares_the_batch() -> None:
    lonely = Harness().generate("dice", temperature=0.8, seed=11, max_tokens=20)
    harness = Harness(max_step_tokens=32)
    for i in range(5):
        harness.add(f"neighbour {i}", temperature=1.0, max_tokens=9)
    assert harness.generate("dice", temperature=0.8, seed=11, max_tokens=20).token_ids == lonely.token_ids


# -- ends


@BOTH_LOOPS
def test_every_stop_id_ends_the_output_and_is_no_part_of_it(overlap: bool) -> None:
    biased = {"logit_bias": {EOT: 100.0}, "min_tokens": 0}
    output = Harness(overlap=overlap).generate("go", max_tokens=9, **biased)
    assert (output.token_ids, output.text) == ((), "")
    assert (output.finish_reason, output.matched_stop) == (FinishReason.STOP, EOT)
    assert output.usage.completion_tokens == 1
    kept = Harness(overlap=overlap).generate("go", max_tokens=9, include_stop=True, **biased)
    assert kept.token_ids == (EOT,)


def test_own_stop_ids_end_the_output_too() -> None:
    third = greedy("go", 3)[2]
    output = Harness().generate("go", max_tokens=9, stop_token_ids=(third,), ignore_eos=True)
    assert list(output.token_ids) == greedy("go", 2)
    assert output.matched_stop == third


@BOTH_LOOPS
def test_min_tokens_masks_stop_ids_until_then(overlap: bool) -> None:
    output = Harness(overlap=overlap).generate("go", max_tokens=9, min_tokens=4, logit_bias={EOS: 100.0})
    assert output.usage.completion_tokens == 5
    assert EOS not in output.token_ids
    assert output.matched_stop == EOS


def test_max_tokens_0_gives_nothing_and_prompt_logprobs_if_asked() -> None:
    harness = Harness()
    output = harness.generate("abc", max_tokens=0)
    assert (output.text, output.token_ids, output.finish_reason) == ("", (), FinishReason.LENGTH)
    assert harness.executor.computed_tokens == 0
    output = harness.generate("abc", max_tokens=0, prompt_logprobs=2)
    assert [p and p.token_id for p in output.prompt_logprobs] == [None, 98, 99]
    assert harness.generate("x", max_tokens=0, prompt_logprobs=0).prompt_logprobs == (None,)


def test_the_context_s_end_ends_the_output() -> None:
    output = Harness(max_model_len=20).generate("p" * 15, ignore_eos=True)
    assert list(output.token_ids) == greedy("p" * 15, 5)
    assert output.finish_reason is FinishReason.LENGTH


# -- texts


@BOTH_LOOPS
def test_a_joined_stream_is_the_whole_text_and_never_half_a_character(overlap: bool) -> None:  # R119
    text = "größe 北京 🙂"
    harness = Harness(overlap=overlap)
    streamed = harness.generate("say", grammar=choice(text), jump_forward=False)
    assert streamed.text == text
    pieces = harness.pieces("r1")
    assert len(pieces) >= len(text.encode()) - 1
    assert all("\ufffd" not in p.text for p in pieces)
    whole = harness.generate("say", grammar=choice(text), stream=False)
    assert whole.text == text
    assert len(harness.pieces("r2")) == 1


@BOTH_LOOPS
@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_text_is_found_across_token_borders(overlap: bool, stream: bool) -> None:  # R121
    spec = choice("one two three")
    harness = Harness(overlap=overlap)
    output = harness.generate("say", grammar=spec, stop=("o t",), stream=stream, jump_forward=False)
    assert (output.text, output.matched_stop) == ("one tw", "o t")
    assert output.finish_reason is FinishReason.STOP
    assert bytes(output.token_ids) == b"one two t"
    kept = harness.generate("say", grammar=spec, stop=("o t",), include_stop=True)
    assert kept.text == "one two t"
    forced = harness.generate("say", grammar=spec, stop=("o t",), stream=stream)
    assert forced.text == "one tw"


def test_a_stop_regex_ends_the_output() -> None:
    output = Harness().generate("say", grammar=choice("abc 123; rest"), stop_regex=(r"\d+;",))
    assert (output.text, output.matched_stop) == ("abc ", r"\d+;")


def test_a_stop_regex_that_takes_too_long_ends_its_own_request_only() -> None:
    harness = Harness(stop_regex_budget_s=0.01)
    evil = harness.add("say", grammar=choice("a" * 64 + "!"), stop_regex=(r"(a+)+(b|c)$",))
    good = harness.add("say", max_tokens=5, ignore_eos=True)
    harness.run()
    assert harness.output(evil).error.type == "InvalidRequest"
    assert list(harness.output(good).token_ids) == greedy("say", 5)


# -- log-probabilities


@BOTH_LOOPS
def test_logprobs_are_those_of_the_tokens(overlap: bool) -> None:
    output = Harness(overlap=overlap).generate("abc", max_tokens=5, logprobs=3, ignore_eos=True)
    assert [p.token_id for p in output.logprobs] == list(output.token_ids)
    for entry in output.logprobs:
        assert entry.top[0] == (entry.token_id, pytest.approx(entry.logprob))
        assert len(entry.top) == 3


@BOTH_LOOPS
@PAGE_SIZES
@pytest.mark.parametrize("step_tokens", [32, 1000])
def test_prompt_logprobs_do_not_depend_on_cache_or_chunks(overlap: bool, page_size: int, step_tokens: int) -> None:
    harness = Harness(overlap=overlap, page_size=page_size, max_step_tokens=step_tokens, max_rows=8)
    prompt = "w" * 50 + "end"
    harness.generate(prompt, max_tokens=2)
    output = harness.generate(prompt, max_tokens=2, prompt_logprobs=1, ignore_eos=True)
    assert len(output.prompt_logprobs) == len(prompt)
    assert output.prompt_logprobs[0] is None
    for i in (1, 17, 52):
        logits = scripted_logits(list(prompt.encode()[:i]), VOCAB)
        entry = output.prompt_logprobs[i]
        assert entry.token_id == ord(prompt[i])
        assert entry.top[0][0] == int(logits.argmax())
        expected = float(logits[ord(prompt[i])]) - float(logits.max())
        assert entry.logprob - entry.top[0][1] == pytest.approx(expected, abs=1e-4)
    assert list(output.token_ids) == greedy(prompt, 2)


# -- refusals: each at the call, and the engine goes on


@pytest.mark.parametrize(
    ("prompt", "fields", "param"),
    [
        ([10**9], {}, "prompt"),  # R49
        ([-1], {}, "prompt"),
        ("x", {"n": 5_000_000}, "n"),  # R49
        ("x", {"stop_token_ids": (9_999_999,), "min_tokens": 5}, "stop_token_ids"),  # R51
        ("x", {"logit_bias": {300: 1.0}}, "logit_bias"),
        ("x", {"stop_regex": ("[a",)}, "stop_regex"),  # R37
        ("x", {"think_budget": 5}, "think_budget"),
        ("x", {"close_on_budget": True}, "close_on_budget"),
        ("x", {"continue_from": "nobody"}, "continue_from"),
        ("x", {"hold": True, "n": 2}, "n"),
    ],
)
def test_what_cannot_work_is_refused_at_the_call(prompt: str, fields: dict, param: str) -> None:
    harness = Harness()
    with pytest.raises(InvalidRequest) as caught:
        harness.add(prompt, **fields)
    assert caught.value.param == param
    assert not harness.core.has_work
    assert list(harness.generate("fine", max_tokens=3, ignore_eos=True).token_ids) == greedy("fine", 3)


def test_an_empty_prompt_begins_with_the_start_token_or_is_refused() -> None:
    output = Harness().generate("", max_tokens=2)
    assert output.prompt_token_ids == (256,)
    with pytest.raises(InvalidRequest, match="no start token"):
        Harness(tokenizer=NoStartToken()).add("")


def test_a_prompt_over_the_context_is_refused_or_cut_if_asked() -> None:
    harness = Harness(max_model_len=32)
    with pytest.raises(PromptTooLong, match="truncate_prompt"):
        harness.add("x" * 32)
    assert harness.generate("x" * 31, ignore_eos=True).usage.completion_tokens == 1
    output = harness.generate("y" * 40 + "end", truncate_prompt=True, max_tokens=4, ignore_eos=True)
    assert bytes(output.prompt_token_ids) == b"y" * 25 + b"end"
    assert len(output.token_ids) == 4


def test_a_prompt_larger_than_the_cache_is_refused() -> None:
    with pytest.raises(OutOfPages):
        Harness(num_pages=16, max_model_len=64).add("x" * 17)


def test_a_full_waiting_list_refuses_at_once() -> None:  # R133
    harness = Harness(max_waiting=2)
    for _ in range(2):
        harness.add("x", max_tokens=1)
    with pytest.raises(Overloaded):
        harness.add("x", max_tokens=1)
    harness.run()


# -- abort


@BOTH_LOOPS
def test_abort_at_any_moment_and_again(overlap: bool) -> None:  # R131
    for steps in range(6):
        harness = Harness(overlap=overlap)
        aborted = harness.add("stop me", max_tokens=50, ignore_eos=True)
        other = harness.add("leave me", max_tokens=5, ignore_eos=True)
        for _ in range(steps):
            harness.step()
        harness.core.abort(aborted)
        harness.core.abort(aborted)
        harness.run()
        harness.core.abort(aborted)
        harness.core.abort("never seen")
        assert harness.output(aborted).finish_reason is FinishReason.ABORT
        assert list(harness.output(other).token_ids) == greedy("leave me", 5)
        assert harness.core.metrics.running == 0


def test_a_deadline_aborts() -> None:
    now = [0.0]
    harness = Harness(clock=lambda: now[0])
    late = harness.add("tick", max_tokens=100, ignore_eos=True, deadline=5.0)
    harness.step()
    assert harness.core.next_deadline == 5.0
    now[0] = 6.0
    harness.step()
    assert harness.output(late).finish_reason is FinishReason.ABORT
    assert "deadline" in harness.output(late).reason
    assert harness.core.next_deadline is None


def test_closing_answers_everybody() -> None:
    harness = Harness()
    request_id = harness.add("x", max_tokens=100)
    harness.core.close()
    harness.outputs += harness.core.step()
    assert harness.output(request_id).finish_reason is FinishReason.ABORT
    assert harness.executor.closed


# -- programs


@BOTH_LOOPS
def test_rows_that_share_a_long_prefix_are_named(overlap: bool) -> None:
    harness = Harness(overlap=overlap, max_model_len=1024, shares_prefix_reads=True)
    trunk = "t" * 400
    for i in range(3):
        harness.add(f"{trunk}{i}", max_tokens=5 + i, ignore_eos=True)
    harness.add("alone", max_tokens=5, ignore_eos=True)
    harness.run()
    decoding = [b for b in harness.executor.batches if b.num_tokens == len(b.rows) == 4]
    assert {b.shared_prefixes for b in decoding} == {((400, (0, 1, 2)),)}
    assert harness.executor.batches[-1].shared_prefixes == ()


def test_shared_prefixes_are_named_only_where_tree_attention_is_on() -> None:
    harness = Harness(max_model_len=1024, shares_prefix_reads=True, tree_attention=False)
    for i in range(3):
        harness.add("t" * 400 + str(i), max_tokens=5, ignore_eos=True)
    harness.run()
    assert {b.shared_prefixes for b in harness.executor.batches} == {()}


def test_a_group_is_named_from_one_step_to_the_next_until_a_row_ends() -> None:
    harness = Harness(max_model_len=1024, shares_prefix_reads=True)
    for i in range(4):
        harness.add("t" * 400 + str(i), max_tokens=20 - 4 * i, ignore_eos=True)
    harness.run()
    groups = [b.shared_prefixes for b in harness.executor.batches if b.num_tokens == len(b.rows) > 1]
    assert {g[0][1] for g in groups} == {(0, 1, 2, 3), (0, 1, 2), (0, 1)}
    assert len({id(g) for g in groups}) < len(groups) / 2, "not made again in every step"


def test_the_oldest_program_goes_first_and_siblings_come_together() -> None:
    harness = Harness(max_rows=2, max_step_tokens=32)
    old = ProgramRef(program_id="old", arrival=1.0)
    young = ProgramRef(program_id="young", arrival=2.0)
    order = [harness.add(f"{i} prompt", max_tokens=2, ignore_eos=True, program=young) for i in range(3)]
    first = [harness.add(f"{i} prompt", max_tokens=2, ignore_eos=True, program=old) for i in range(2)]
    harness.run()
    ended = [o.request_id for o in harness.outputs if o.finished]
    assert ended[:2] == first
    assert set(ended[2:]) == set(order)


def test_announced_siblings_are_admitted_in_one_step() -> None:
    now = [0.0]
    harness = Harness(clock=lambda: now[0], gang_wait_s=0.01)
    ref = ProgramRef(program_id="p", siblings=2)
    harness.add("branch a", max_tokens=1, program=ref)
    harness.step()
    assert not harness.executor.batches
    harness.add("branch b", max_tokens=1, program=ref)
    harness.step()
    assert len(harness.executor.batches[0].rows) == 2
    harness.add("branch c", max_tokens=1, program=ref)  # the other one never comes
    now[0] = 0.02
    harness.run()
    assert len(harness.executor.batches) == 2


def test_what_a_program_reads_again_outlives_what_it_does_not() -> None:
    harness = Harness(num_pages=96, max_model_len=96)
    read_again = ProgramRef(program_id="p", wanted_again=-1, remaining=1)
    kept = harness.generate("keep this prefix", max_tokens=4, ignore_eos=True, program=read_again)
    for i in range(12):
        harness.generate(f"{i} something else", max_tokens=20, ignore_eos=True)
    tokens = [*b"keep this prefix", *kept.token_ids, *b" more"]
    again = harness.generate(tokens, max_tokens=1, program=ProgramRef(program_id="p"))
    assert again.usage.cached_tokens >= len(tokens) - 6
