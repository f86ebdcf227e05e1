from __future__ import annotations

import numpy as np
import pytest

from sglite.errors import InvalidRequest
from sglite.protocol import ScoreRequest
from sglite.runtime.scoring import ScoreTrie
from tests.fakes.executor import scripted_logits
from tests.runtime.harness import VOCAB, Harness


def _logprobs(prompt: bytes, continuation: bytes) -> list[float]:
    out = []
    for j, token in enumerate(continuation):
        logits = scripted_logits([*prompt, *continuation[:j]], VOCAB).astype(np.float64)
        out.append(float(logits[token] - logits.max() - np.log(np.exp(logits - logits.max()).sum())))
    return out


CONTINUATIONS = [b"yes", b"yes sir", b"no", b"", b"yes", b"never", b"y", b"not now"]


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("step_tokens", [8, 1000])
def test_each_token_of_each_continuation_is_scored(overlap: bool, page_size: int, step_tokens: int) -> None:  # R113
    harness = Harness(overlap=overlap, page_size=page_size, max_step_tokens=step_tokens, max_rows=8)
    prompt = b"Do you like this question, or not?"
    for _ in range(2):
        output = harness.score(list(prompt), CONTINUATIONS)
        for got, continuation in zip(output.logprobs, CONTINUATIONS, strict=True):
            assert got == pytest.approx(_logprobs(prompt, continuation), abs=1e-4)
        assert output.usage.prompt_tokens == len(prompt)
    assert output.usage.cached_tokens >= len(prompt) - page_size - len(prompt) % page_size


def test_all_continuations_run_in_one_step_and_share_every_token() -> None:
    harness = Harness()
    harness.score("prompt", CONTINUATIONS)
    assert len(harness.executor.batches) == 1
    internal = {c[:j] for c in CONTINUATIONS for j in range(1, len(c))}
    assert harness.executor.computed_tokens == len("prompt") + len(internal)


def test_single_token_options_need_no_token_of_their_own() -> None:
    harness = Harness()
    harness.score("which", [[65], [66], [67], [68]])
    assert harness.executor.computed_tokens == len("which")
    assert harness.executor.batches[0].rows.tolist() == [31 - 31]


def test_nothing_to_score_is_answered() -> None:
    assert Harness().score("x", []).logprobs == ()
    assert Harness().score("x", [[], []]).logprobs == ((), ())


def test_a_continuation_out_of_the_vocabulary_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        Harness().core.add(ScoreRequest(request_id="s", prompt="x", continuations=((10**9,),)))


def test_an_aborted_scoring_gives_one_error() -> None:
    harness = Harness(max_step_tokens=4, max_rows=4)
    harness.core.add(ScoreRequest(request_id="s", prompt="a long prompt here", continuations=((1, 2), (3, 4))))
    harness.step()
    harness.core.abort("s")
    harness.run()
    outputs = [o for o in harness.outputs if o.request_id == "s"]
    assert len(outputs) == 1
    assert outputs[0].error.type == "RequestAborted"


def test_a_trie_is_cut_into_rows_that_hold_each_internal_token_once() -> None:
    trie = ScoreTrie(3, [b"abc", b"abx", b"ade"])
    assert [row.tokens.tolist() for row in trie.rows] == [list(b"ab"), list(b"ad")]
    assert trie.rows[0].targets.positions.tolist() == [2, 3, 3, 4, 4]
    assert trie.rows[1].targets.positions.tolist() == [4]
