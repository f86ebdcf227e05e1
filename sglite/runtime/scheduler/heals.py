"""The boundary between a prompt and its answer, verified in the prompt's own step.

A healed prompt lost its last token, which the first draw spells again or goes beyond (sglite/grammar/heal.py). Models
spell it again nearly always. So it is computed with the prompt as a draft: the step draws at the boundary, under the
boundary's mask, and behind it. Where the boundary's draw is the draft, both tokens count, as with any draft; the text
is the one of two steps.

    one by one    prompt -> boundary is drawn -> first token is drawn -> ...
    as a draft    prompt, boundary -> [boundary], first token are drawn -> ...

A row goes on in the next step as if the draft had been confirmed (`Request.assumed`). Where it was not, what that step
computed of the row is dropped, which costs the row a step.

A device that works beside the host is asked for it only once boundaries have been spelled again nearly always, or where
the answer has room for one token, which saves the whole second step. On an H200 with random weights, which hardly ever
spell them again, rows that lost a step mixed with others made programs slower (chats by 5 %, skeletons by 15 %).
"""

from __future__ import annotations

from sglite.runtime.request import Request

_FIRST_GUESS = 0.7
_MEMORY = 0.03  # weight of the newest boundary
_WORTH = 0.5  # a step saved or a step lost
_GUESS_BESIDE = 0.6
_WORTH_BESIDE = 0.8  # a step lost there mixes that row's steps with those of others from then on


class Heals:
    """How often the boundary was spelled again, lately. `beside`: the device works beside the host."""

    def __init__(self, *, beside: bool = False) -> None:
        self.share = _GUESS_BESIDE if beside else _FIRST_GUESS
        self._worth = _WORTH_BESIDE if beside else _WORTH

    def saw(self, *, again: bool) -> None:
        self.share += _MEMORY * (again - self.share)

    def drafts(self, request: Request) -> bool:
        """Whether the dropped token of a request that is about to be admitted should be computed with its prompt."""
        completion, room = request.completion, request.limit - request.num_tokens
        if completion is None or completion.healed_token < 0 or request.num_output or room < 2:
            return False
        if request.grammar is not None or request.matcher is None or request.targets is not None:
            return False
        if request.sampling.needs_counts or completion.num_logprobs >= 0 or completion.min_tokens > 1:
            return False
        return room == 2 or self.share >= self._worth
