"""Fill a form: each field has its own regex or type, the text between them costs nothing to generate."""

from __future__ import annotations

import sglite as sgl

FIELDS = {
    "date": r"20[0-9]{2}-(0[1-9]|1[0-2])-([0-2][0-9]|3[01])",
    "time": r"([01][0-9]|2[0-3]):[0-5][0-9]",
    "phone": r"\([0-9]{3}\) [0-9]{3}-[0-9]{4}",
}


@sgl.function
def booking(s: sgl.ProgramState, request: str):
    s += f"Request: {request}\n\nBooking form\n"
    with s.var_scope("form"):
        for field, pattern in FIELDS.items():
            s += f"{field}: " + sgl.gen(field, regex=pattern, temperature=0) + "\n"
        s += "guests: " + sgl.gen_int("guests", max_tokens=4, temperature=0) + "\n"
        s += "smoking: " + sgl.gen("smoking", dtype=bool, temperature=0) + "\n"


def main() -> dict[str, str]:
    state = booking.run(
        request="A table for 4 on the 12th of May 2026 at half past seven. Call (555) 123-4567. No smoking."
    )
    print(state["form"])
    return {field: state[field] for field in [*FIELDS, "guests", "smoking"]}


if __name__ == "__main__":
    with sgl.Engine(model="smollm2") as engine:
        sgl.set_default_backend(engine)
        main()
