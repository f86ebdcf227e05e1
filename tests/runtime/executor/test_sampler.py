"""The sampler through the executor: distributions, seeds, masks, penalties, drafts, logprobs, failures."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from sglite.runtime.batch import DEVICE_TOKEN, RowSampling
from tests.fakes.batches import GREEDY, RANDOM, Part, generate, ints, load_row, make_batch, run_step
from tests.fakes.table_model import table_executor

VOCAB = 50


def random_table(seed: int = 0, *, scale: float = 1.5) -> torch.Tensor:
    return torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def one_distribution(logits: list[float]) -> torch.Tensor:
    return torch.tensor(logits).expand(len(logits), -1).contiguous()


def frequencies(table: torch.Tensor, sampling: RowSampling, draws: int = 4000) -> np.ndarray:
    """How often each token is drawn after token 0, over draws of different seeds."""
    executor = table_executor(table)
    counts: Counter[int] = Counter()
    for first in range(0, draws, 16):
        loads = [load_row(i, replace(sampling, seed=first + i), prompt=[]) for i in range(16)]
        result = run_step(executor, make_batch([Part(i, 0, [0]) for i in range(16)], loads=loads))
        counts.update(result.tokens[:, 0].tolist())
    return np.array([counts[t] / draws for t in range(table.shape[1])])


LOGITS = [2.0, 1.5, 1.0, 0.0, -1.0, -3.0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_tempered_softmax(temperature: float) -> None:
    expected = torch.softmax(torch.tensor(LOGITS) / temperature, -1).numpy()
    found = frequencies(one_distribution(LOGITS), replace(RANDOM, temperature=temperature))
    assert np.abs(found - expected).max() < 0.03


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ({"top_k": 2}, [0, 1]),
        ({"top_k": 1}, [0]),
        ({"top_p": 0.5}, [0, 1]),  # 0.46 + 0.28
        ({"top_p": 0.1}, [0]),
        ({"min_p": 0.3}, [0, 1, 2]),  # exp(-1) = 0.37, exp(-2) = 0.14
        ({"top_k": 3, "top_p": 0.8}, [0, 1]),  # renormalised over three: 0.51 + 0.31
        ({"top_k": 5, "min_p": 0.9}, [0]),
    ],
)
def test_filters_keep_the_right_tokens_in_proportion(change: dict[str, float], kept: list[int]) -> None:
    expected = np.zeros(len(LOGITS))
    expected[kept] = torch.softmax(torch.tensor([LOGITS[i] for i in kept]), -1).numpy()
    found = frequencies(one_distribution(LOGITS), replace(RANDOM, **change), 2000)  # type: ignore[arg-type]
    assert set(np.flatnonzero(found)) == set(kept)
    assert np.abs(found - expected).max() < 0.04


def test_a_nucleus_wider_than_the_candidates_is_found_by_sorting() -> None:
    table = torch.zeros(3000, 3000)
    found = frequencies(table, replace(RANDOM, top_p=0.99), 800)
    assert (found > 0).sum() > 600  # uniform: hardly a token twice, also beyond the first candidates


def test_the_draw_depends_on_seed_and_index_alone() -> None:
    table = random_table()
    samplings = [replace(RANDOM, seed=i, top_p=0.9 if i % 2 else 1.0, temperature=0.7 + i / 10) for i in range(6)]
    prompts = [[i] for i in range(6)]
    together = generate(table_executor(table), prompts, 12, sampling=samplings)
    alone = [generate(table_executor(table), [p], 12, sampling=s)[0] for p, s in zip(prompts, samplings, strict=True)]
    backwards = generate(table_executor(table), prompts[::-1], 12, sampling=samplings[::-1])[::-1]
    assert together == alone == backwards


def test_other_seeds_give_other_text() -> None:
    outputs = generate(
        table_executor(random_table()), [[0]] * 8, 12, sampling=[replace(RANDOM, seed=i) for i in range(8)]
    )
    assert len({tuple(o) for o in outputs}) == 8


def test_a_tiny_temperature_is_greedy() -> None:
    table = random_table()
    assert generate(table_executor(table), [[1]], 10, sampling=replace(RANDOM, temperature=1e-9)) == generate(
        table_executor(table), [[1]], 10
    )


@pytest.mark.parametrize("sampling", [GREEDY, RANDOM, replace(RANDOM, top_p=0.8), replace(RANDOM, top_k=3)])
def test_only_tokens_of_the_mask_are_drawn(sampling: RowSampling) -> None:
    executor = table_executor(random_table())
    rng = np.random.default_rng(0)
    for i in range(20):
        allowed = sorted(rng.choice(VOCAB, int(rng.integers(1, 6)), replace=False).tolist())
        parts = [Part(0, 0, [3], masks=[0]), Part(1, 0, [4]), Part(2, 0, [5], masks=[1])]
        loads = [load_row(r, replace(sampling, seed=i)) for r in range(3)]
        result = run_step(executor, make_batch(parts, loads=loads), masks=[allowed, [7]])
        assert result.tokens[0, 0] in allowed
        assert result.tokens[2, 0] == 7
        assert not result.errors


def test_a_row_without_a_mask_draws_what_it_draws_beside_masked_rows() -> None:
    executor = table_executor(random_table())
    load = load_row(1, replace(RANDOM, seed=5))
    alone = run_step(executor, make_batch([Part(1, 0, [4])], loads=[load]))
    parts = [Part(0, 0, [3], masks=[0]), Part(1, 0, [4])]
    mixed = run_step(executor, make_batch(parts, loads=[load_row(0), load]), masks=[[1]])
    assert mixed.tokens[1, 0] == alone.tokens[0, 0]


def test_a_forced_token_wins_over_penalties_bias_and_infinite_logits() -> None:
    table = random_table()
    table[3, 9] = -torch.inf
    sampling = replace(
        RANDOM,
        presence_penalty=2.0,
        frequency_penalty=2.0,
        repetition_penalty=100.0,
        logit_bias=((9, -100.0),),
        top_p=0.1,
    )
    result = run_step(
        table_executor(table),
        make_batch([Part(0, 0, [9, 9, 3], masks=[0])], loads=[load_row(0, sampling, prompt=[9, 9, 3])]),
        masks=[[9]],
    )
    assert result.tokens[0, 0] == 9
    assert not result.errors


def test_nan_logits_and_empty_masks_fail_their_row_alone() -> None:
    table = random_table()
    table[1] = torch.nan
    table[2, 5] = torch.nan
    parts = [Part(0, 0, [0]), Part(1, 0, [1]), Part(2, 0, [2], masks=[1]), Part(3, 0, [3], masks=[0]), Part(4, 0, [4])]
    for sampling in (GREEDY, RANDOM):
        loads = [load_row(i, sampling) for i in range(5)]
        result = run_step(table_executor(table), make_batch(parts, loads=loads), masks=[[], [7]])
        assert set(result.errors) == {1, 2, 3}
        assert "NaN" in result.errors[1]
        assert "grammar" in result.errors[3]


def test_bias_moves_the_choice() -> None:
    table = random_table()
    best = int(table[0].argmax())
    sampling = replace(GREEDY, logit_bias=((best, -100.0), (7, 50.0)))
    loads = [load_row(0, sampling), load_row(1)]
    result = run_step(table_executor(table), make_batch([Part(0, 0, [0]), Part(1, 0, [0])], loads=loads))
    assert result.tokens[:, 0].tolist() == [7, best]


def plain_generate(table: torch.Tensor, prompt: list[int], steps: int, sampling: RowSampling) -> list[int]:
    """Greedy with penalties, token by token."""
    outputs: list[int] = []
    for _ in range(steps):
        scores = table[(prompt + outputs)[-1]].clone()
        counts = Counter(outputs)
        for token in set(prompt) | set(outputs):
            scores[token] = (
                scores[token] / sampling.repetition_penalty
                if scores[token] > 0
                else scores[token] * sampling.repetition_penalty
            )
        for token, count in counts.items():
            scores[token] -= sampling.frequency_penalty * count + sampling.presence_penalty
        outputs.append(int(scores.argmax()))
    return outputs


PENALTIES = [
    replace(GREEDY, repetition_penalty=1.3),
    replace(GREEDY, presence_penalty=1.0),
    replace(GREEDY, frequency_penalty=0.4),
    replace(GREEDY, repetition_penalty=1.1, presence_penalty=0.3, frequency_penalty=0.2),
]


@pytest.mark.parametrize("sampling", PENALTIES)
def test_penalties_count_prompt_and_output(sampling: RowSampling) -> None:
    table = random_table()
    prompt = [4, 4, 9]
    mates = [GREEDY, sampling, replace(GREEDY, presence_penalty=2.0)]
    outputs = generate(table_executor(table), [[1], prompt, [2]], 30, sampling=mates)
    assert outputs[1] == plain_generate(table, prompt, 30, sampling)


@pytest.mark.parametrize("sampling", PENALTIES)
def test_forced_text_is_counted_once(sampling: RowSampling) -> None:
    """A draw, then forced tokens behind it, then draws: the same as if all had been drawn."""
    table = random_table()
    prompt = [4, 9]
    expected = plain_generate(table, prompt, 12, sampling)
    executor = table_executor(table)
    loads = [load_row(0, sampling, prompt=prompt)]
    first = run_step(executor, make_batch([Part(0, 0, prompt)], loads=loads))
    assert first.tokens[0, 0] == expected[0]
    chunk = Part(0, 2, [DEVICE_TOKEN, *expected[1:4]], num_logits=0, samples=False)  # a chunk that draws nothing
    run_step(executor, make_batch([chunk]))
    then = run_step(executor, make_batch([Part(0, 6, expected[4:7], output_index=7)]))
    assert then.tokens[0, 0] == expected[7]
    for k in range(8, 12):
        result = run_step(executor, make_batch([Part(0, len(prompt) + k - 1, [DEVICE_TOKEN], output_index=k)]))
        assert result.tokens[0, 0] == expected[k]


@pytest.mark.parametrize("sampling", PENALTIES)
def test_a_retracted_row_comes_back_with_its_counts(sampling: RowSampling) -> None:
    table = random_table()
    prompt = [4, 9]
    expected = plain_generate(table, prompt, 10, sampling)
    executor = table_executor(table)
    load = replace(load_row(3, sampling, prompt=prompt), output_ids=ints(expected[:6]))
    run_step(executor, make_batch([Part(3, 0, prompt + expected[:3], num_logits=0, samples=False)], loads=[load]))
    result = run_step(executor, make_batch([Part(3, 5, expected[3:6], output_index=6)]))
    assert result.tokens[0, 0] == expected[6]
    result = run_step(executor, make_batch([Part(3, 8, [DEVICE_TOKEN], output_index=7)]))
    assert result.tokens[0, 0] == expected[7]


@pytest.mark.parametrize("sampling", [GREEDY, replace(RANDOM, seed=11), replace(RANDOM, seed=3, top_p=0.8), *PENALTIES])
def test_drafts_give_the_text_that_plain_decoding_gives(sampling: RowSampling) -> None:
    table = random_table(scale=3.0)
    prompt = [4, 9]
    expected = generate(table_executor(table), [prompt], 20, sampling=sampling)[0]
    executor = table_executor(table)
    rng = np.random.default_rng(0)
    result = run_step(executor, make_batch([Part(0, 0, prompt)], loads=[load_row(0, sampling, prompt=prompt)]))
    output = [int(result.tokens[0, 0])]
    accepted_drafts = 0
    while len(output) < 16:
        k = len(output)
        drafts = list(expected[k : k + 3])
        if rng.random() < 0.6:
            drafts[int(rng.integers(3))] = int(rng.integers(VOCAB))
        part = Part(0, len(prompt) + k - 1, [output[-1], *drafts], num_logits=4, num_drafts=3, output_index=k)
        mate = Part(1, k, [7], output_index=k)
        result = run_step(executor, make_batch([mate, part], loads=[load_row(1)] if k == 1 else []))
        count = int(result.num_accepted[1])
        accepted_drafts += count - 1
        output += result.tokens[1, :count].tolist()
        assert result.num_accepted[0] == 1
    assert output == expected[: len(output)]
    assert accepted_drafts > 3


def test_after_drafts_the_device_token_is_the_last_accepted_one() -> None:
    table = random_table()
    expected = generate(table_executor(table), [[4]], 6)[0]
    executor = table_executor(table)
    run_step(executor, make_batch([Part(0, 0, [4])], loads=[load_row(0)]))
    drafts = [expected[1], (expected[2] + 1) % VOCAB]
    part = Part(0, 1, [expected[0], *drafts], num_logits=3, num_drafts=2, output_index=1)
    assert run_step(executor, make_batch([part])).num_accepted[0] == 2
    result = run_step(executor, make_batch([Part(0, 3, [DEVICE_TOKEN], output_index=3)]))
    assert result.tokens[0, 0] == expected[3]


def test_each_draft_has_its_own_mask() -> None:
    executor = table_executor(random_table())
    run_step(executor, make_batch([Part(0, 0, [4])], loads=[load_row(0)]))
    part = Part(0, 1, [4, 10, 20], num_logits=3, num_drafts=2, output_index=1, masks=[2, 0, 1])
    result = run_step(executor, make_batch([part]), masks=[[20], [30], [10]])
    assert result.tokens[0].tolist() == [10, 20, 30]


def test_logprobs_come_from_the_models_own_distribution() -> None:
    table = random_table()
    sampling = replace(RANDOM, temperature=0.3, presence_penalty=1.0, logit_bias=((3, 5.0),), logprobs=4)
    parts = [Part(0, 0, [1]), Part(1, 0, [2], wants_logprobs=True, masks=[0])]
    loads = [load_row(0), load_row(1, sampling, prompt=[2])]
    allowed = [5, 6, 7]
    result = run_step(table_executor(table), make_batch(parts, loads=loads), masks=[allowed])
    token = int(result.tokens[1, 0])
    free = table[2].log_softmax(-1)
    assert list(result.chosen_logprobs) == [1]
    assert result.chosen_logprobs[1] == pytest.approx([float(free[token])], abs=1e-5)
    masked = table[2][allowed].log_softmax(-1)[allowed.index(token)]
    assert result.masked_logprobs[1] == pytest.approx([float(masked)], abs=1e-5)
    ids, values = result.top_logprobs[1]
    np.testing.assert_array_equal(ids[0], free.topk(4).indices)
    np.testing.assert_allclose(values[0], free.topk(4).values, atol=1e-5)


def test_logprobs_of_targets_at_chosen_positions() -> None:
    table = random_table()
    tokens = [3, 8, 1, 6]
    part = Part(0, 0, tokens, num_logits=3, samples=False, targets=[5, 6, 7, 8], target_positions=[0, 0, 1, 2])
    result = run_step(table_executor(table), make_batch([part], loads=[load_row(0)]))
    free = table.log_softmax(-1)
    expected = [free[8, 5], free[8, 6], free[1, 7], free[6, 8]]
    np.testing.assert_allclose(result.chosen_logprobs[0], expected, atol=1e-5)
    assert result.num_accepted[0] == 0
    assert not result.top_logprobs


def test_many_scored_positions_are_computed_in_blocks() -> None:
    table = random_table()
    tokens = np.random.default_rng(0).integers(0, VOCAB, 150).tolist()
    targets = tokens[1:] + [0]
    part = Part(0, 0, tokens, num_logits=150, samples=False, targets=targets, wants_logprobs=True)
    result = run_step(table_executor(table), make_batch([part], loads=[load_row(0, replace(GREEDY, logprobs=2))]))
    free = table.log_softmax(-1)[tokens]
    np.testing.assert_allclose(result.chosen_logprobs[0], free[torch.arange(150), torch.tensor(targets)], atol=1e-5)
    np.testing.assert_allclose(result.top_logprobs[0][1], free.topk(2).values, atol=1e-5)


def test_a_row_index_that_is_loaded_again_forgets_its_last_tenant() -> None:
    table = random_table()
    executor = table_executor(table)
    biased = replace(GREEDY, logit_bias=((7, 100.0),), presence_penalty=1.0)
    assert generate(executor, [[1]], 3, sampling=biased)[0][0] == 7
    assert generate(executor, [[1]], 12) == generate(table_executor(table), [[1]], 12)
