"""Text in, a validated object out: nested models, an enum, an optional field and a list, always well-formed."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

from pydantic import BaseModel, Field

import sglite as sgl

Short = Annotated[str, Field(max_length=24)]


class Priority(Enum):
    low = "low"
    normal = "normal"
    urgent = "urgent"


class Customer(BaseModel):
    name: Short
    email: Annotated[str, Field(pattern=r"^[a-z.]{1,20}@[a-z]{1,12}\.com$")] | None


class Ticket(BaseModel):
    customer: Customer
    product: Short
    priority: Priority
    tags: Annotated[list[Short], Field(max_length=3)]
    days_waiting: Annotated[int, Field(ge=0, le=60)]


MESSAGES = [
    "Hi, Ann Lee here (ann.lee@example.com). My Photon lamp has been broken for 3 days, please hurry!",
    "This is Bob. No rush, but the Quark kettle I bought last week leaks a little.",
]


@sgl.function
def extract(s: sgl.ProgramState, message: str):
    s += sgl.system("You turn customers' messages into JSON tickets.")
    s += sgl.user(message)
    s += sgl.assistant(sgl.gen("ticket", schema=Ticket, max_tokens=256, temperature=0))


def main() -> list[Ticket]:
    states = extract.run_batch([{"message": message} for message in MESSAGES])
    tickets: list[Ticket] = [state["ticket"] for state in states]
    for ticket in tickets:
        print(ticket.model_dump_json(indent=2))
    return tickets


if __name__ == "__main__":
    with sgl.Engine(model="smollm2") as engine:
        sgl.set_default_backend(engine)
        main()
