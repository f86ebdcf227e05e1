"""How large the workloads are, and texts of a wanted length."""

from __future__ import annotations

import random
from dataclasses import dataclass

from sglite.text.types import TextTokenizer

_WORDS = (
    "river", "stone", "garden", "window", "paper", "music", "winter", "market", "engine", "letter", "forest",
    "bridge", "silver", "morning", "captain", "kitchen", "island", "mirror", "summer", "lantern", "harbor", "meadow",
    "thunder", "candle", "valley", "copper", "station", "pocket", "museum", "journey", "violin",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """`scale` multiplies the lengths of texts and answers, `pause_scale` the tools' pauses, `share` the number of
    questions of the workloads that ask many."""

    scale: float = 1.0
    pause_scale: float = 1.0
    share: float = 1.0

    def tokens(self, full: int) -> int:
        return max(4, round(full * self.scale))

    def count(self, full: int) -> int:
        return max(1, round(full * self.share))


class Texts:
    """Texts of about `tokens` tokens, the same for the same key."""

    def __init__(self, tokenizer: TextTokenizer, shape: Shape) -> None:
        self._tokenizer = tokenizer
        self.shape = shape

    def text(self, key: str, tokens: int) -> str:
        """`tokens` before the shape's scale."""
        dice = random.Random(key)
        wanted = self.shape.tokens(tokens)
        words = [dice.choice(_WORDS) for _ in range(wanted)]  # no word is less than a token
        ids = self._tokenizer.encode(" " + " ".join(words))[:wanted]
        return self._tokenizer.decode(ids).strip()
