"""Continuations to score as a trie over the shared prompt, cut into rows that compute every shared token once.

    prompt ... p -- a -- b -- c        internal nodes (their logits are read): p, a, b, d
                     \\    \\- x        leaves (only their log-probability is wanted): c, x, e
                      \\- d -- e       rows: [p a b] and [d]

The last prompt token is the root. A row is a path of internal nodes from a branching down; it shares the KV of
everything above by the prefix cache, in the very step that computes it. Leaves are never computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sglite.runtime.batch import IntArray


@dataclass(slots=True, eq=False)
class Targets:
    """Tokens whose log-probabilities are wanted at given positions of a row; its logits start at the first of them.

    `positions` ascend; several ids may stand at one position. Results are written chunk by chunk, again after a
    retraction with the same values.
    """

    positions: IntArray  # [K] position in the row whose logits are read
    ids: IntArray  # [K]
    num_top: int  # best alternatives wanted at each position
    logprobs: NDArray[np.float32] = field(init=False)  # [K]
    top: dict[int, tuple[IntArray, NDArray[np.float32]]] = field(default_factory=dict)  # position -> (ids, logprobs)
    num_done: int = 0  # of K, from the left

    def __post_init__(self) -> None:
        self.logprobs = np.zeros(len(self.ids), np.float32)

    @property
    def next_position(self) -> int | None:
        """The first position whose result is missing."""
        return int(self.positions[self.num_done]) if self.num_done < len(self.positions) else None


@dataclass(slots=True, eq=False)
class _Node:
    token: int
    depth: int  # tokens of the continuation up to and with this one; the root has 0
    children: dict[int, _Node] = field(default_factory=dict)
    result: tuple[int, int] = (-1, -1)  # (row, place among its targets) of this token's log-probability


@dataclass(frozen=True, slots=True, eq=False)
class ScoreRow:
    """`tokens`: what follows the prompt in this row; `targets` with positions in the row (prompt included)."""

    tokens: IntArray
    targets: Targets


class ScoreTrie:
    def __init__(self, num_prompt: int, continuations: Sequence[Sequence[int]]) -> None:
        """num_prompt >= 1: the first continuation token needs logits to be scored with."""
        self._root = _Node(-1, 0)
        self._paths = [self._add(tokens) for tokens in continuations]
        self.rows: list[ScoreRow] = []
        pending: list[tuple[_Node, tuple[int, ...]]] = [(self._root, ())]
        while pending:
            head, above = pending.pop(0)
            self._cut_row(num_prompt, head, above, pending)

    def logprobs(self) -> tuple[tuple[float, ...], ...]:
        """One tuple per continuation, in the order given, one number per token. All rows must be done."""
        return tuple(
            tuple(float(self.rows[row].targets.logprobs[at]) for row, at in (node.result for node in path))
            for path in self._paths
        )

    def _add(self, tokens: Sequence[int]) -> list[_Node]:
        path: list[_Node] = []
        node = self._root
        for token in tokens:
            child = node.children.get(token)
            if child is None:
                child = node.children[token] = _Node(token, node.depth + 1)
            node = child
            path.append(node)
        return path

    def _cut_row(
        self, num_prompt: int, head: _Node, above: tuple[int, ...], pending: list[tuple[_Node, tuple[int, ...]]]
    ) -> None:
        """The row that begins with `head` and goes down through its longest internal branch."""
        row = len(self.rows)
        tokens = list(above) if head is self._root else [*above, head.token]
        positions: list[int] = []
        ids: list[int] = []
        node: _Node | None = head
        while node is not None:
            for child in node.children.values():
                child.result = (row, len(ids))
                positions.append(num_prompt - 1 + node.depth)
                ids.append(child.token)
            internal = [child for child in node.children.values() if child.children]
            if len(internal) > 1:
                internal.sort(key=_height, reverse=True)
            pending.extend((child, tuple(tokens)) for child in internal[1:])
            node = internal[0] if internal else None
            if node is not None:
                tokens.append(node.token)
        targets = Targets(np.array(positions, np.int32), np.array(ids, np.int32), 0)
        self.rows.append(ScoreRow(np.array(tokens, np.int32), targets))


def _height(node: _Node) -> int:
    """Levels below `node`."""
    levels, nodes = 0, [node]
    while nodes:
        nodes = [child for n in nodes for child in n.children.values()]
        levels += 1
    return levels
