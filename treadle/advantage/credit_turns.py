"""Credit among turns: those that answered the same observation are compared (GiGPO).

Guarantees: turns are compared within a group of rollouts alone, and only where what was shown just
before them is the same, token by token; a turn whose observation nobody else met gets nothing on
top of its rollout's advantage.

Takes: Groups, advantages, rewards per turn. Gives: advantages per token.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from hashlib import blake2b

from treadle.advantage.judged import check_finite
from treadle.advantage.tokens import Advantage, map_tokens
from treadle.errors import ContractError
from treadle.types import Group, Node, Source, Trajectory

GAMMA = 0.95
"""Discount per turn."""


def turn_credit(
    groups: Sequence[Group],
    values: Mapping[str, Advantage],
    *,
    rewards: Mapping[str, Sequence[float]] | None = None,
    gamma: float = GAMMA,
    weight: float = 1.0,
) -> dict[str, dict[int, tuple[float, ...]]]:
    """A = A_rollout + weight * A_turn, A_turn = the turn's discounted return minus the mean of
    those turns of the group that answered the same observation; 0 for one alone.

    Args:
        values: A_rollout, from `advantages`.
        rewards: by trajectory id, one per trained turn in order, in reward units (an environment's
            steps); None or no entry = the trajectory's reward, on its last trained turn.
        gamma: discount per turn, in [0, 1].
        weight: of A_turn; both are in reward units where `values` are.

    Raises ContractError: another number of rewards than trained turns, or one is not finite.

    Source: GiGPO (arXiv:2505.10978), anchor-state groups, centred without a deviation. The state is
        what was shown since the turn before, not the whole history.
    """
    out: dict[str, dict[int, tuple[float, ...]]] = {}
    for group in groups:
        met: dict[bytes, list[tuple[str, int, float]]] = defaultdict(list)
        for t in group.scored:
            given = None if rewards is None else rewards.get(t.id)
            for turn, value in zip(turns(t), turn_returns(group, t, given, gamma), strict=True):
                if (seen := observation(t, turn)) is not None:
                    met[seen].append((t.id, turn.id, value))
        step: dict[tuple[str, int], float] = {}
        for same in met.values():
            mean = math.fsum(value for _, _, value in same) / len(same)
            step |= {(t, node): value - mean for t, node, value in same if len(same) > 1}
        for t in group.scored:
            out[t.id] = map_tokens(
                t,
                values[t.id],
                lambda node, i, x, t=t, step=step: x + weight * step.get((t.id, node.id), 0.0),
            )
    return out


def turns(trajectory: Trajectory) -> list[Node]:
    """Nodes with a trained token, in the order in which they were sampled."""
    return [node for node in trajectory.nodes if any(node.trained)]


def turn_returns(
    group: Group, trajectory: Trajectory, rewards: Sequence[float] | None, gamma: float
) -> list[float]:
    """G_k = r_k + gamma * G_{k+1} over the trained turns of a rollout."""
    count = len(turns(trajectory))
    if rewards is None:
        rewards = [0.0] * (count - 1) + [float(trajectory.reward.value or 0.0)]
    if len(rewards) != count:
        raise ContractError(
            f"trajectory {trajectory.id} has {count} trained turns, but {len(rewards)} rewards"
        )
    out: list[float] = []
    ahead = 0.0
    for reward in reversed(rewards):
        check_finite(group, trajectory, reward, "of a turn")
        ahead = reward + gamma * ahead
        out.append(ahead)
    return out[::-1]


def observation(trajectory: Trajectory, turn: Node) -> bytes | None:
    """Hash of the tokens shown between the turn before and this one; None when there are none."""
    nodes = {node.id: node for node in trajectory.nodes}
    parts: list[str] = []
    parent = turn.parent
    while parent is not None and nodes[parent].source is not Source.SAMPLED:
        parts += map(str, reversed(nodes[parent].ids))
        parent = nodes[parent].parent
    return blake2b(" ".join(parts).encode(), digest_size=16).digest() if parts else None
