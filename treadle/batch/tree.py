"""Shared prompts as a tree, and the tree as a Layout.

Guarantees: two rows share exactly the tokens on which their prompts agree from the start; the walk
from a row's leaf segment to its root gives the row back, id by id; parents precede children.

Takes: token rows with the lengths of their prompts. Gives: a Layout and the packed place of every
token of every row.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from treadle.types import Layout, Segment

Row = tuple[Sequence[int], int]
"""Token ids, and how many of them are prompt (and so may be shared)."""


class PromptTree:
    """The prompts of one group so far; tells how much of a new one is already stored."""

    def __init__(self) -> None:
        self._sorted: list[tuple[int, ...]] = []

    def shared(self, prompt: tuple[int, ...]) -> int:
        """Tokens at the start of `prompt` that some added prompt has too."""
        at = bisect_left(self._sorted, prompt)
        # In lexicographic order, the longest agreement is with a neighbour.
        return max(
            (_common(prompt, other) for other in self._sorted[max(0, at - 1) : at + 1]), default=0
        )

    def add(self, prompt: tuple[int, ...]) -> None:
        at = bisect_left(self._sorted, prompt)
        if self._sorted[at : at + 1] != [prompt]:
            self._sorted.insert(at, prompt)


def build_layout(groups: Sequence[Sequence[Row]]) -> tuple[Layout, list[NDArray[np.int64]]]:
    """Lay out the rows of several groups; only rows of one group share segments.

    Returns:
        The layout, and for each row (groups flattened) its tokens' places in the packed vector.
    """
    segments: list[Segment] = []
    places: list[NDArray[np.int64]] = []
    total = 0
    for rows in groups:
        prompts = [tuple(ids[:prompt]) for ids, prompt in rows]
        mine = [np.zeros(len(ids), dtype=np.int64) for ids, _ in rows]
        # Sorted, the rows of every stretch are neighbours, and what the first and the last of
        # them agree on, all agree on. Equal prompts keep their order.
        order = sorted(range(len(rows)), key=prompts.__getitem__)
        # (members, tokens of each that are already laid out, segment that they continue)
        stack: list[tuple[list[int], int, int | None]] = [(order, 0, None)]
        while stack:
            members, start, parent = stack.pop()
            first, last = members[0], members[-1]
            end = len(rows[first][0]) if first == last else _common(prompts[first], prompts[last])
            if end > start:
                segments.append(Segment(total, end - start, parent, start))
                parent = len(segments) - 1
                for member in members:
                    mine[member][start:end] = np.arange(total, total + end - start)
                total += end - start
            if first != last:
                parts = _parts(prompts, members, end)
                stack += [(part, end, parent) for part in reversed(parts)]
        places += mine
    return Layout(tuple(segments)), places


def _parts(prompts: Sequence[tuple[int, ...]], members: list[int], at: int) -> list[list[int]]:
    """Divide rows that agree up to `at`: by the next prompt token; alone where the prompt ends."""
    parts: dict[tuple[str, int], list[int]] = {}
    for member in members:
        ends = len(prompts[member]) == at
        key = ("alone", member) if ends else ("next", prompts[member][at])
        parts.setdefault(key, []).append(member)
    return list(parts.values())


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    return next(i for i in range(n) if a[i] != b[i])
