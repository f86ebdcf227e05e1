"""Which keys of an object may be there together: boolean formulas over key names.

`required`, `dependencies` and combinations of nothing but these (anyOf of required lists, not required)
never touch a value, so they stay one formula that the object's grammar follows key by key: the state is what
is left of the formula once the keys so far are known (`assign`).
"""

from __future__ import annotations

from collections.abc import Iterable

# True, False, ("key", name), ("not", f), ("and", frozenset of f), ("or", frozenset of f)
Formula = bool | tuple[str, object]


def key(name: str) -> Formula:
    return ("key", name)


def negate(formula: Formula) -> Formula:
    if isinstance(formula, bool):
        return not formula
    return formula[1] if formula[0] == "not" else ("not", formula)  # type: ignore[return-value]


def conjunction(parts: Iterable[Formula]) -> Formula:
    return _combine("and", parts, neutral=True)


def disjunction(parts: Iterable[Formula]) -> Formula:
    return _combine("or", parts, neutral=False)


def exactly_one(parts: list[Formula]) -> Formula:
    return disjunction(
        conjunction([part, *(negate(other) for j, other in enumerate(parts) if j != i)]) for i, part in enumerate(parts)
    )


def _combine(kind: str, parts: Iterable[Formula], *, neutral: bool) -> Formula:
    flat: set[Formula] = set()
    for part in parts:
        if isinstance(part, bool):
            if part != neutral:
                return part
        elif part[0] == kind:
            flat |= part[1]  # type: ignore[arg-type]
        else:
            flat.add(part)
    if any(negate(part) in flat for part in flat):
        return not neutral
    if not flat:
        return neutral
    return next(iter(flat)) if len(flat) == 1 else (kind, frozenset(flat))


def assign(formula: Formula, name: str, present: bool) -> Formula:
    """What is left of the formula once it is known whether `name` is there."""
    if isinstance(formula, bool):
        return formula
    kind, inner = formula
    if kind == "key":
        return present if inner == name else formula
    if kind == "not":
        return negate(assign(inner, name, present))  # type: ignore[arg-type]
    parts = [assign(part, name, present) for part in inner]  # type: ignore[attr-defined]
    return conjunction(parts) if kind == "and" else disjunction(parts)


def names_in(formula: Formula) -> set[str]:
    if isinstance(formula, bool):
        return set()
    kind, inner = formula
    if kind == "key":
        return {inner}  # type: ignore[arg-type]
    if kind == "not":
        return names_in(inner)  # type: ignore[arg-type]
    return set().union(*(names_in(part) for part in inner))  # type: ignore[attr-defined]


def size(formula: Formula) -> int:
    if isinstance(formula, bool) or formula[0] == "key":
        return 1
    if formula[0] == "not":
        return 1 + size(formula[1])  # type: ignore[arg-type]
    return 1 + sum(size(part) for part in formula[1])  # type: ignore[attr-defined]


def truth_without_keys(formula: Formula) -> bool:
    """The formula's value for an object in which none of its keys are there."""
    for name in names_in(formula):
        formula = assign(formula, name, False)
    assert isinstance(formula, bool)
    return formula
