"""Hundreds of requests with aborts, forks, holds, evictions and retractions: every page is accounted for after every
batch, and every answer is the one that the request gets alone."""

from __future__ import annotations

import random
from typing import Any

import pytest

from sglite.protocol import FinishReason, ProgramRef, ScoreRequest
from tests.fakes.matcher import BatchLoopFiller, choice
from tests.runtime.harness import Harness

CHOICES = choice("alpha", "alpine lake", "beta", '{"name": "x", "id": 1}', '{"name": "y", "id": 22}')


def _prompt(rng: random.Random) -> bytes:
    """Prompts that share prefixes in all the ways a tree can be cut."""
    base = rng.choice((b"the quick brown fox ", b"the quick red fox jumps ", b"once upon ", b"q"))
    return base[: rng.randint(1, len(base))] + bytes(rng.choice(b"ab") for _ in range(rng.randint(0, 40)))


def _fields(rng: random.Random) -> dict[str, Any]:
    fields: dict[str, Any] = {"max_tokens": rng.choice((0, 1, 2, 5, 17, 40, 90)), "stream": rng.random() < 0.5}
    kind = rng.random()
    if kind < 0.25:
        fields |= {"grammar": CHOICES, "jump_forward": rng.random() < 0.7}
    elif kind < 0.35:
        fields |= {"temperature": 1.0, "seed": rng.randrange(1 << 40), "n": rng.choice((1, 2, 3))}
    elif kind < 0.45:
        fields |= {"stop": ("a", "\x07b"), "min_tokens": min(2, fields["max_tokens"])}
    elif kind < 0.5:
        fields |= {"logprobs": 2, "prompt_logprobs": 1}
    elif kind < 0.6:
        fields |= {"stop_token_ids": tuple(rng.sample(range(256), 20)), "n": rng.choice((1, 4))}
    elif kind < 0.65:
        fields |= {"heal": True}
    if rng.random() < 0.3:
        wanted = rng.choice((0, -1, 7))
        program = ProgramRef(program_id=f"p{rng.randrange(9)}", remaining=rng.randrange(3), wanted_again=wanted)
        fields["program"] = program
    return fields


def _alone(prompt: bytes, fields: dict[str, Any], index: int) -> Any:
    alone = Harness(num_pages=512)
    request_id = alone.add(prompt, **{k: v for k, v in fields.items() if k not in ("hold", "program")})
    alone.run()
    return alone.output(request_id, index)


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
@pytest.mark.parametrize(("page_size", "num_pages"), [(1, 160), (16, 11)])
@pytest.mark.parametrize("seed", [1, 2])
def test_every_answer_equals_the_uncontended_one(
    overlap: bool, page_size: int, num_pages: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglite.runtime.scheduler.scheduler._MIN_SHARED_TOKENS", 3)
    rng = random.Random(seed)
    harness = Harness(
        shares_prefix_reads=True,
        filler=BatchLoopFiller() if overlap else None,
        prompt_lookup=3 if seed == 2 else 0,
        lookup_rows=8,
        overlap=overlap,
        page_size=page_size,
        num_pages=num_pages,
        max_rows=8,
        max_step_tokens=48,
        max_model_len=160,
    )
    asked: dict[str, tuple[bytes, dict[str, Any]]] = {}
    aborted: set[str] = set()
    scores: dict[str, ScoreRequest] = {}
    while len(asked) < 65:
        for _ in range(rng.randrange(4)):
            prompt, fields = _prompt(rng), _fields(rng)
            if rng.random() < 0.1:
                continuations = tuple(_prompt(rng)[-9:] for _ in range(rng.randrange(5)))
                request = ScoreRequest(
                    request_id=f"s{len(scores)}",
                    prompt=tuple(prompt),
                    continuations=tuple(tuple(c) for c in continuations),
                )
                scores[request.request_id] = request
                harness.core.add(request)
                continue
            if fields.get("n", 1) == 1 and rng.random() < 0.2:
                fields["hold"] = True
            asked[harness.add(prompt, **fields)] = prompt, fields
        for _ in range(rng.randrange(5)):
            harness.step()
        if asked and rng.random() < 0.15:
            request_id = rng.choice(list(asked))
            harness.core.abort(request_id)
            aborted.add(request_id)
        if rng.random() < 0.05:
            harness.core.flush_cache()
        for held in [r for r, (_, f) in asked.items() if f.get("hold")]:
            if rng.random() < 0.1:
                harness.core.release(held)
    harness.run()

    assert harness.core.metrics.retractions > 0
    assert harness.core.metrics.evicted_pages > 0
    assert any(batch.shared_prefixes for batch in harness.executor.batches), "read through the pages of one of them"
    for request_id, (prompt, fields) in asked.items():
        for index in range(fields.get("n", 1)):
            got, alone = harness.output(request_id, index), _alone(prompt, fields, index)
            if got.finish_reason is FinishReason.ABORT:
                assert request_id in aborted
                assert alone.token_ids[: len(got.token_ids)] == got.token_ids
                continue
            assert got.token_ids == alone.token_ids
            assert got.text == alone.text
            assert (got.finish_reason, got.matched_stop) == (alone.finish_reason, alone.matched_stop)
            assert got.logprobs == alone.logprobs
            assert got.prompt_logprobs == alone.prompt_logprobs
            assert got.usage.completion_tokens == alone.usage.completion_tokens
            assert got.usage.forced_tokens == alone.usage.forced_tokens
    for request_id, request in scores.items():
        got_score = next(o for o in harness.outputs if o.request_id == request_id)
        assert got_score.logprobs == Harness().score(request.prompt, request.continuations).logprobs
    assert not harness.core._jobs
