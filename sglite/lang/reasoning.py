"""Where a reasoning model's thinking ends, by model family."""

from __future__ import annotations

from dataclasses import dataclass

from sglite.errors import ProgramSyntaxError


@dataclass(frozen=True, slots=True)
class Markers:
    begin: str
    end: str
    implied: bool = False  # the answer begins inside the reasoning, without the begin marker


_THINK = ("<think>", "</think>")
_FAMILIES = {
    "deepseek-r1": Markers(*_THINK, implied=True),
    "deepseek-v3": Markers(*_THINK),
    "qwen3": Markers(*_THINK),
    "qwen3-thinking": Markers(*_THINK, implied=True),
    "kimi": Markers("◁think▷", "◁/think▷"),
    "kimi_k2": Markers(*_THINK),
    "glm45": Markers(*_THINK),
}


def markers_of(model_type: str | None) -> Markers:
    """Raises ProgramSyntaxError for an unknown family."""
    found = _FAMILIES.get((model_type or "deepseek-r1").lower())
    if found is None:
        raise ProgramSyntaxError(
            f"unknown model_type {model_type!r}; known are {', '.join(_FAMILIES)}", param="model_type"
        )
    return found


def split_reasoning(text: str, markers: Markers) -> tuple[str, str]:
    """(reasoning, answer). Without an end marker all of it is reasoning if it has begun, else all is answer."""
    stripped = text.lstrip()
    begun = stripped.startswith(markers.begin)
    if not begun and not markers.implied:
        return "", text
    body = stripped[len(markers.begin) :] if begun else text
    reasoning, end, answer = body.partition(markers.end)
    if not end:
        return body.strip(), ""
    return reasoning.strip(), answer.lstrip()
