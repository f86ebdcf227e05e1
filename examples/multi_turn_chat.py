"""A conversation: what was said stays as tokens, so every turn computes only what is new."""

from __future__ import annotations

import sglite as sgl

QUESTIONS = ["Name a fruit that is yellow.", "What can I cook with it?", "How long does that take?"]


@sgl.function
def chat(s: sgl.ProgramState, questions: list[str]):
    s += sgl.system("You are a friendly cook. Answer in one short sentence.")
    for number, question in enumerate(questions):
        with s.user():
            s += question
        with s.assistant():
            s += sgl.gen(f"answer_{number}", max_tokens=40, temperature=0)


def main() -> list[dict[str, str]]:
    state = chat.run(questions=QUESTIONS)
    for message in state.messages():
        print(f"{message['role']:>9}: {message['content'].strip()}")
    for number in range(len(QUESTIONS)):
        meta = state.get_meta_info(f"answer_{number}")
        print(f"turn {number + 1}: {meta['cached_tokens']} of {meta['prompt_tokens']} prompt tokens were cached")
    return state.messages()


if __name__ == "__main__":
    with sgl.Engine(model="smollm2") as engine:
        sgl.set_default_backend(engine)
        main()
