"""How `select` picks one of its options from their log-probabilities.

    token_length_normalized              mean log-probability of an option's tokens
    greedy_token_selection               token by token; an option that ended goes on with its own mean
    unconditional_likelihood_normalized  mean of (log-probability after the prompt - the same without the prompt)
    total_probability                    the exact probability of the whole option

The first three decide as SGLang's methods of these names do, except that every token counts, also one with
log-probability 0.0. Each method gives every option a score, larger is better; a temperature draws an option in
proportion to exp(score / temperature).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

Logprobs = Sequence[Sequence[float]]  # [option][token], natural logarithms


@dataclass(frozen=True, slots=True)
class Evidence:
    """`unconditional` is there only for methods that ask for it; its rows have the lengths of `conditional`'s."""

    conditional: Logprobs
    unconditional: Logprobs | None = None


class ChoicesMethod(Protocol):
    name: str
    needs_unconditional: bool

    def scores(self, evidence: Evidence) -> list[float] | None:
        """One score an option; None where options are only compared step by step (then `walk` decides)."""
        ...

    def walk(self, evidence: Evidence, *, temperature: float, rng: random.Random) -> int:
        """The index of the chosen option."""
        ...


class _ByScore:
    needs_unconditional = False

    def scores(self, evidence: Evidence) -> list[float]:
        raise NotImplementedError

    def walk(self, evidence: Evidence, *, temperature: float, rng: random.Random) -> int:
        return pick(self.scores(evidence), temperature=temperature, rng=rng)


class TokenLengthNormalized(_ByScore):
    name = "token_length_normalized"

    def scores(self, evidence: Evidence) -> list[float]:
        return [mean(row) for row in evidence.conditional]


class UnconditionalLikelihoodNormalized(_ByScore):
    name = "unconditional_likelihood_normalized"
    needs_unconditional = True

    def scores(self, evidence: Evidence) -> list[float]:
        assert evidence.unconditional is not None
        pairs = zip(evidence.conditional, evidence.unconditional, strict=True)
        return [mean([given - alone for given, alone in zip(row, base, strict=True)]) for row, base in pairs]


class TotalProbability(_ByScore):
    name = "total_probability"

    def scores(self, evidence: Evidence) -> list[float]:
        return [math.fsum(row) for row in evidence.conditional]


class GreedyTokenSelection:
    name = "greedy_token_selection"
    needs_unconditional = False

    def scores(self, evidence: Evidence) -> None:
        return None

    def walk(self, evidence: Evidence, *, temperature: float, rng: random.Random) -> int:
        """At each token keep the options whose token is the likeliest (or is drawn); the first of what remains."""
        width = max(len(row) for row in evidence.conditional)
        padded = [[*row, *[mean(row)] * (width - len(row))] for row in evidence.conditional]
        remaining = list(range(len(padded)))
        for column in range(width):
            values = list(dict.fromkeys(padded[i][column] for i in remaining))
            chosen = values[pick(values, temperature=temperature, rng=rng)]
            remaining = [i for i in remaining if padded[i][column] == chosen]
            if len(remaining) == 1:
                break
        return remaining[0]


token_length_normalized = TokenLengthNormalized()
greedy_token_selection = GreedyTokenSelection()
unconditional_likelihood_normalized = UnconditionalLikelihoodNormalized()
total_probability = TotalProbability()


CHOICES_METHODS: dict[str, ChoicesMethod] = {
    method.name: method
    for method in (
        token_length_normalized,
        greedy_token_selection,
        unconditional_likelihood_normalized,
        total_probability,
    )
}


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def pick(scores: Sequence[float], *, temperature: float, rng: random.Random) -> int:
    """The first best index at temperature 0, else one drawn in proportion to exp(score / temperature)."""
    best = max(range(len(scores)), key=scores.__getitem__)
    if temperature <= 0 or scores[best] == -math.inf:
        return best
    weights = [math.exp((score - scores[best]) / temperature) for score in scores]
    return rng.choices(range(len(scores)), weights=weights)[0]


def probabilities(conditional: Logprobs) -> list[float]:
    """Exact probability of each option, normalised over the options."""
    totals = [math.fsum(row) for row in conditional]
    best = max(totals)
    if best == -math.inf:
        return [1 / len(totals)] * len(totals)
    weights = [math.exp(total - best) for total in totals]
    return [weight / math.fsum(weights) for weight in weights]
