"""The first program: a question, a streamed answer, and a fact about it as a Python object."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

import sglite as sgl


class City(BaseModel):
    name: str = Field(max_length=30)
    country: str = Field(max_length=30)
    continent: Literal["Africa", "America", "Asia", "Europe", "Oceania"]


@sgl.function
def capital(s: sgl.ProgramState, country: str):
    s += sgl.user(f"What is the capital of {country}?")
    s += sgl.assistant(sgl.gen("answer", max_tokens=40, temperature=0))
    s += sgl.user("Tell me that city's name, country and continent as JSON.")
    s += sgl.assistant(sgl.gen("city", schema=City, temperature=0))


def main() -> City:
    state = capital.run(country="France", stream=True)
    for piece in state.text_iter("answer"):
        print(piece, end="", flush=True)
    city: City = state["city"]
    print(f"\n{city!r}")
    print(f"{state.usage.completion_tokens} tokens generated, {state.usage.cached_tokens} prompt tokens from the cache")
    return city


if __name__ == "__main__":
    with sgl.Engine(model="smollm2") as engine:
        sgl.set_default_backend(engine)
        main()
