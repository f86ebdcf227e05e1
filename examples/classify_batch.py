"""Classify many texts at once: `select` scores every label exactly, and the few-shot prefix is computed once."""

from __future__ import annotations

import sglite as sgl

LABELS = ["positive", "negative", "neutral"]
REVIEWS = [
    "I love this phone, the battery lasts for days.",
    "It broke after a week and nobody answers my mails.",
    "It is a phone. It makes calls.",
    "Best purchase of the year!",
    "The screen is scratched and the box was open.",
    "Arrived on Tuesday.",
]


@sgl.function
def classify(s: sgl.ProgramState, review: str):
    s += "Decide whether a review is positive, negative or neutral.\n\n"
    s += "Review: Wonderful, I would buy it again.\nLabel: positive\n\n"
    s += "Review: A waste of money.\nLabel: negative\n\n"
    s += "Review: The package holds one cable.\nLabel: neutral\n\n"
    s += "Review: " + review + "\nLabel: "
    s += sgl.select("label", LABELS, choices_method=sgl.total_probability)


def main() -> list[str]:
    states = classify.run_batch([{"review": review} for review in REVIEWS], progress_bar=True)
    for review, state in zip(REVIEWS, states, strict=True):
        label = state["label"]
        probability = state.get_meta_info("label")["probabilities"][label]
        print(f"{label:>8} {probability:5.1%}  {review}")
    return [state["label"] for state in states]


if __name__ == "__main__":
    with sgl.Engine(model="smollm2") as engine:
        sgl.set_default_backend(engine)
        main()
