"""Streams: the text of a whole program as it comes, and one variable of many async programs side by side."""

from __future__ import annotations

import asyncio

import sglite as sgl


@sgl.function
def story(s: sgl.ProgramState, hero: str):
    s += f"Once upon a time there was {hero}"
    s += sgl.gen("beginning", max_tokens=24, stop=".", temperature=0) + ".\n"
    s += "One day" + sgl.gen("middle", max_tokens=24, stop=".", temperature=0) + ".\nThe end."


@sgl.function
async def rhyme(s: sgl.ProgramState, word: str):
    s += f"A word that rhymes with {word} is"
    s += sgl.gen("rhyme", max_tokens=4, stop=["\n", "."], temperature=0)
    return s["rhyme"].strip()


async def read_variable(hero: str) -> str:
    """`text_async_iter(name)` waits for the variable, wherever in the program it is written."""
    state = await story.run_async(hero=hero, stream=True)
    return "".join([piece async for piece in state.text_async_iter("middle")])


async def side_by_side() -> list[str]:
    states = await asyncio.gather(*(rhyme.run_async(word=word) for word in ("cat", "tree", "sun")))
    middles = await asyncio.gather(read_variable("a fox"), read_variable("a king"))
    return [state.ret_value for state in states] + list(middles)


def main() -> list[str]:
    for piece in story.run(hero="a small dragon", stream=True).text_iter():
        print(piece, end="", flush=True)
    print()
    found = asyncio.run(side_by_side())
    print(found)
    return found


if __name__ == "__main__":
    with sgl.Engine(model="smollm2") as engine:
        sgl.set_default_backend(engine)
        main()
