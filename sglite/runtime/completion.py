"""The client's side of one completion: which text and tokens it has got, and what may end it."""

from __future__ import annotations

from dataclasses import dataclass, field

from sglite.protocol import TokenLogprob
from sglite.runtime.stop import StopChecker, StopMatch
from sglite.text.detokenizer import Detokenizer


@dataclass(slots=True, eq=False)
class Completion:
    detokenizer: Detokenizer
    stops: StopChecker | None
    stop_ids: frozenset[int]
    extra_stop_ids: frozenset[int]  # of those, the request's own: under a grammar legal only where it is complete
    min_tokens: int
    stream: bool
    num_logprobs: int  # -1: off
    jump_forward: bool
    include_stop: bool
    healed_token: int = -1  # the prompt's last token, which the first one of the output has to begin with
    healed_length: int = 0  # leading characters that the prompt's text has already: those of a healed token
    skip_text: int = 0  # how many of them are still to come
    num_sent: int = 0  # output tokens that the client has
    began: bool = False  # a first output was sent
    matched_stop: str | int | None = None
    stop_id_hidden: bool = False  # the last token is a stop id, no part of the output
    cached_tokens: int = 0
    forced_tokens: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    text: str = ""  # certain and not sent yet
    logprobs: list[TokenLogprob] = field(default_factory=list)  # not sent yet

    def plain_text(self, token_id: int) -> str:
        """The text of one token where nothing can stop in it."""
        text = self.detokenizer.push((token_id,))
        return self._unhealed(text) if self.skip_text else text

    def read(self, token_ids: list[int], num_output: int) -> StopMatch | None:
        """Take the text of the newest tokens; `num_output` counts them in. Raises StopRegexTimeout."""
        text = self._unhealed(self.detokenizer.push(token_ids))
        if self.stops is None:
            self.text += text
            return None
        certain, match = self.stops.push(text, armed=num_output >= self.min_tokens)
        self.text += certain
        return match

    def finish_text(self) -> None:
        """The output ended without a stop text: what waited comes out."""
        rest = self._unhealed(self.detokenizer.flush())
        if self.stops is not None:
            rest = self.stops.push(rest, armed=False)[0] if rest else self.stops.flush()
        self.text += rest

    def _unhealed(self, text: str) -> str:
        if self.skip_text:
            skipped = min(self.skip_text, len(text))
            self.skip_text -= skipped
            return text[skipped:]
        return text
