"""What an estimator sees of a group: rewards and token counts of the rollouts that count.

Guarantees: one entry per rollout whatever its number of branches, in the order of `Group.scored`,
of which those are left out that have no trained token of the party or no reward for it; every
reward is finite; a length counts each trained token once and no observation.

Takes: a Group and a party. Gives: Judged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from treadle.errors import ConfigError, ContractError
from treadle.types import Group, Party, Trajectory

GROUP_RELATIVE = frozenset(
    {"group_mean", "rloo", "grpo", "maxrl", "opo", "batch_std", "gdpo", "reinforce_pp_baseline"}
)
"""Advantages that compare the trajectories of a group: one alone teaches them nothing."""

TOLERANCE = 1e-6
"""Rewards closer than this share of the largest |reward| of their group are equal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """The rollouts of one group that are compared; all tuples have one entry per rollout."""

    rewards: tuple[float, ...]
    lengths: tuple[int, ...]
    """Trained tokens, >= 1."""
    parts: tuple[Mapping[str, float], ...] = ()
    """`Reward.parts`, for estimators of several rewards."""


def judged(group: Group, party: Party = Party.POLICY) -> tuple[list[Trajectory], Judged]:
    """The rollouts of `group` that count for `party`, and what an estimator needs of them.

    Raises ContractError: a reward is not finite.
    """
    members = [
        (t, reward, length)
        for t in group.scored
        if (reward := party_reward(t, party)) is not None and (length := num_trained(t, party))
    ]
    for trajectory, reward, _ in members:
        check_finite(group, trajectory, reward)
    return [t for t, _, _ in members], Judged(
        rewards=tuple(float(reward) for _, reward, _ in members),
        lengths=tuple(length for _, _, length in members),
        parts=tuple(t.reward.parts for t, _, _ in members),
    )


def party_reward(trajectory: Trajectory, party: Party) -> float | None:
    """The reward of a party: the policy's is the trajectory's, another's is the part of its name,
    e.g. `Reward(value=1.0, parts={"agent": -1.0})`. None = not judged."""
    reward = trajectory.reward
    return reward.value if party is Party.POLICY else reward.parts.get(str(party))


def trained_parties(trajectory: Trajectory) -> tuple[Party, ...]:
    """Parties with a trained token, in the order of the enumeration."""
    found = {node.party for node in trajectory.nodes if any(node.trained)}
    return tuple(party for party in Party if party in found)


def num_trained(trajectory: Trajectory, party: Party) -> int:
    """Trained tokens of a party; a node that several branches share counts once."""
    return sum(sum(node.trained) for node in trajectory.nodes if node.party is party)


def check_finite(group: Group, trajectory: Trajectory, reward: float, name: str = "") -> None:
    """Raises ContractError naming the trajectory when its reward is not a finite number."""
    if not math.isfinite(reward):
        raise ContractError(
            f"trajectory {trajectory.id} of group {group.ordinal} has reward "
            + (f"`{name}` {reward}" if name else f"{reward}"),
            hint="a grader that cannot judge leaves the trajectory unscored (value None)",
        )


def equal(rewards: Sequence[float]) -> bool:
    """Fewer than two rewards, or all within TOLERANCE of one another: nothing to compare."""
    if len(rewards) < 2:
        return True
    return max(rewards) - min(rewards) <= TOLERANCE * max(abs(r) for r in rewards)


def comparable(
    group: Group,
    members: Sequence[Trajectory],
    view: Judged,
    estimator: str,
    weights: Mapping[str, float],
) -> bool:
    """Whether the estimator can say anything of these rollouts of the group: any one at all, or,
    where it compares them, two that differ in a reward that it reads.

    Raises ConfigError: `gdpo` without weights. ContractError: a reward that it reads is missing or
    not finite.
    """
    if estimator not in GROUP_RELATIVE:
        return bool(members)
    if estimator != "gdpo":
        return not equal(view.rewards)
    if not weights:
        raise ConfigError(
            "advantage `gdpo` needs the weight of each reward",
            hint='e.g. {"score": 1.0, "format": 0.5}: parts that every reward of the run has',
        )
    for trajectory, parts in zip(members, view.parts, strict=True):
        for name in weights:
            if name not in parts:
                raise ContractError(
                    f"trajectory {trajectory.id} of group {group.ordinal} has no reward `{name}`; "
                    f"it has {', '.join(sorted(parts)) or 'none'}",
                    hint="a grader that cannot judge one of several rewards leaves all unscored",
                )
            check_finite(group, trajectory, parts[name], name)
    return any(not equal([parts[name] for parts in view.parts]) for name in weights)
