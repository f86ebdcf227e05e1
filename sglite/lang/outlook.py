"""What a program will do after each of its calls, read off its graph before it runs.

The engine is told how long the rest is, whether the tokens are read again, and which rows will be continued.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sglite.protocol import GraphNode, ProgramGraph

_CALLS = ("gen", "select")
# What may stand between two generations of one state whose row goes on: text, known by then.
_BETWEEN = ("text", "argument", "variable", "set", "role_begin", "role_end", "scope_begin", "scope_end", "join")


@dataclass(frozen=True, slots=True)
class Outlook:
    """After one call. `remaining`: calls on the longest path to the program's end. `read_again`: a later call begins
    with these tokens. `goes_on`: the state itself may make the next call, so that its row can be continued."""

    name: str | None
    remaining: int
    read_again: bool
    goes_on: bool


Place = tuple[int, int]
"""A call in its program: (state, how many calls this state has made by then, itself included)."""


def outlooks(graph: ProgramGraph) -> Mapping[Place, Outlook]:
    """By the place of each call."""
    after = _calls_after(graph)
    found: dict[Place, Outlook] = {}
    made: dict[int, int] = {}
    for i, node in enumerate(graph.nodes):
        if node.op in _CALLS:
            made[node.branch] = made.get(node.branch, 0) + 1
            later = [n for n in graph.nodes[i + 1 :] if n.branch == node.branch]
            found[node.branch, made[node.branch]] = Outlook(
                name=node.name,
                remaining=after[i],
                read_again=not graph.complete or any(n.op in (*_CALLS, "fork") for n in later),
                goes_on=_goes_on(later, complete=graph.complete),
            )
    return found


def _goes_on(later: list[GraphNode], *, complete: bool) -> bool:
    following = next((node for node in later if node.op not in _BETWEEN), None)
    return not complete if following is None else following.op in _CALLS


def _calls_after(graph: ProgramGraph) -> list[int]:
    """For each node, the calls on the longest path that begins behind it. What a node waits for stands before it in
    the graph, so one pass from the end is enough."""
    after = [0] * len(graph.nodes)
    last: dict[int, int] = {}  # of each branch so far, in program order
    waits: list[list[int]] = []  # the nodes that each node waits for
    for i, node in enumerate(graph.nodes):
        needed = [last[node.branch]] if node.branch in last else []
        if node.source is not None:
            needed.append(node.source)
        if node.op in ("join", "concatenate"):
            needed += [last[child] for child in node.children if child in last]
        if node.op == "fork":
            last |= dict.fromkeys(node.children, i)
        last[node.branch] = i
        waits.append(needed)
    for i in range(len(graph.nodes) - 1, -1, -1):
        own = after[i] + (graph.nodes[i].op in _CALLS)
        for needed in waits[i]:
            after[needed] = max(after[needed], own)
    return after
