"""An advantage per token: the two forms in which advantages leave this room, and back and forth.

Guarantees: tokens outside of a node's trained mask hold NaN (masked means absent); a trained token
that holds NaN is one that credit assignment took out of the mask, and a row must not train it; a
trajectory is one episode, whose tokens stand in the order in which its nodes were made, whatever
branches they belong to.

Takes: a Trajectory and numbers. Gives: numbers by node id.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from treadle.errors import ContractError
from treadle.types import Node, Trajectory

Advantage = float | Mapping[int, tuple[float, ...]]
"""One number for all trained tokens of a trajectory, or one per token of each node by node id."""


def per_node(trajectory: Trajectory, value: Advantage) -> dict[int, tuple[float, ...]]:
    """One value per token of each node; NaN where the token is not trained.

    Raises ContractError: a node is missing, or has another number of values than tokens.
    """
    return map_tokens(trajectory, value, lambda node, index, x: x)


def map_tokens(
    trajectory: Trajectory, value: Advantage, change: Callable[[Node, int, float], float]
) -> dict[int, tuple[float, ...]]:
    """`per_node`, with `change(node, index, value)` applied to every trained token's value."""
    out: dict[int, tuple[float, ...]] = {}
    for node in trajectory.nodes:
        values = _of_node(trajectory, node, value)
        out[node.id] = tuple(
            change(node, i, x) if trained else math.nan
            for i, (x, trained) in enumerate(zip(values, node.trained, strict=True))
        )
    return out


def chain(trajectory: Trajectory) -> NDArray[np.bool_]:
    """The trained mask of all tokens of the trajectory, nodes in order."""
    return np.array([t for node in trajectory.nodes for t in node.trained], dtype=bool)


def unchain(trajectory: Trajectory, values: NDArray[np.float64]) -> dict[int, tuple[float, ...]]:
    """The inverse layout of `chain`: values of all tokens, by node id."""
    out: dict[int, tuple[float, ...]] = {}
    start = 0
    for node in trajectory.nodes:
        out[node.id] = tuple(values[start : start + len(node.ids)].tolist())
        start += len(node.ids)
    if start != len(values):
        raise ContractError(
            f"trajectory {trajectory.id} has {start} tokens, but {len(values)} values were given"
        )
    return out


def _of_node(trajectory: Trajectory, node: Node, value: Advantage) -> Sequence[float]:
    if not isinstance(value, Mapping):
        return [value] * len(node.ids)
    values = value.get(node.id)
    if values is None and not any(node.trained):
        return [math.nan] * len(node.ids)
    if values is None or len(values) != len(node.ids):
        raise ContractError(
            f"trajectory {trajectory.id}: node {node.id} has {len(node.ids)} tokens and "
            f"{'no' if values is None else len(values)} advantages",
            hint="a trained token without one is given NaN, never left out",
        )
    return values
