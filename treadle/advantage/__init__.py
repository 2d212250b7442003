"""From rewards to advantages: how much better a rollout was than the others of its group.

Guarantees:
- statistics are over the *rollouts* of a prompt: one with seven branches counts once, and one that
  is unscored, failed, aborted or without trained tokens does not count at all;
- a group of one, or whose rewards are equal within a tolerance, gets exactly 0;
- the advantages of a group sum to 0, checked on every call.

Takes: Groups with rewards. Gives: one advantage per judged trajectory, by trajectory id.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from treadle.advantage.group_mean import group_mean
from treadle.advantage.grpo import grpo
from treadle.advantage.rloo import rloo
from treadle.errors import ConfigError, ContractError, did_you_mean
from treadle.types import Group

__all__ = ["ESTIMATORS", "advantages", "group_stats", "zero_variance"]

ESTIMATORS: dict[str, Callable[[Sequence[float]], list[float]]] = {
    "group_mean": group_mean,
    "rloo": rloo,
    "grpo": grpo,
}
"""Rewards of one group (two or more) to their advantages, in the same order."""

TOLERANCE = 1e-6
"""Rewards closer than this share of the largest |reward| of their group are equal."""

SUM_TOLERANCE = 1e-6
"""Allowed |sum of a group's advantages| as a share of its largest |advantage|."""


def advantages(groups: Sequence[Group], estimator: str) -> dict[str, float]:
    """One advantage for each trajectory of `Group.scored`, by trajectory id.

    A trajectory that does not count has no entry, and so no training row: 0 would still weigh in
    the token mean.

    Args:
        groups: each with at least the rewards that have been judged so far.
        estimator: a key of ESTIMATORS; its file has the formula and the unit.

    Raises:
        ConfigError: unknown estimator.
        ContractError: a reward is not finite, a trajectory comes twice, or a group's advantages
            do not sum to 0 within SUM_TOLERANCE.
    """
    if estimator not in ESTIMATORS:
        raise ConfigError(
            f"unknown advantage estimator `{estimator}`", hint=did_you_mean(estimator, ESTIMATORS)
        )
    out: dict[str, float] = {}
    for group in groups:
        rewards = _rewards(group)
        values = [0.0] * len(rewards) if _equal(rewards) else ESTIMATORS[estimator](rewards)
        _check_sum(group, estimator, values)
        for trajectory, value in zip(group.scored, values, strict=True):
            if trajectory.id in out:
                raise ContractError(
                    f"trajectory {trajectory.id} is in the batch twice (again in group "
                    f"{group.ordinal}): it would be trained twice"
                )
            out[trajectory.id] = value
    return out


def zero_variance(group: Group) -> bool:
    """True when no trajectory of the group can teach anything: fewer than two count, or the
    rewards of those that count are equal within TOLERANCE."""
    return _equal(_rewards(group))


def group_stats(groups: Sequence[Group]) -> dict[str, float]:
    """Counts behind the advantages, as metrics.

    Returns:
        `advantage/groups`, `advantage/singleton_groups` (exactly one trajectory counts),
        `advantage/empty_groups` (none counts), `advantage/zero_variance_groups` (two or more
        count and their rewards are equal) and `advantage/left_out_trajectories` (unscored,
        failed, aborted or without trained tokens).
    """
    sizes = [len(group.scored) for group in groups]
    equal = sum(zero_variance(group) for group in groups)
    left_out = sum(len(group.trajectories) for group in groups) - sum(sizes)
    return {
        "advantage/groups": float(len(groups)),
        "advantage/singleton_groups": float(sizes.count(1)),
        "advantage/empty_groups": float(sizes.count(0)),
        "advantage/zero_variance_groups": float(equal - sizes.count(1) - sizes.count(0)),
        "advantage/left_out_trajectories": float(left_out),
    }


def _rewards(group: Group) -> list[float]:
    rewards = [float(t.reward.value) for t in group.scored if t.reward.value is not None]
    for trajectory, reward in zip(group.scored, rewards, strict=True):
        if not math.isfinite(reward):
            raise ContractError(
                f"trajectory {trajectory.id} of group {group.ordinal} has reward {reward}",
                hint="a grader that cannot judge leaves the trajectory unscored (value None)",
            )
    return rewards


def _equal(rewards: Sequence[float]) -> bool:
    if len(rewards) < 2:
        return True
    return max(rewards) - min(rewards) <= TOLERANCE * max(abs(r) for r in rewards)


def _check_sum(group: Group, estimator: str, values: Sequence[float]) -> None:
    total = math.fsum(values)
    scale = max((abs(v) for v in values), default=0.0)
    if not abs(total) <= SUM_TOLERANCE * scale:
        raise ContractError(
            f"advantages of group {group.ordinal} (task {group.task.id}, {len(values)} "
            f"trajectories) by `{estimator}` sum to {total:g}, expected 0 within "
            f"{SUM_TOLERANCE:g} x {scale:g}",
            hint="the baseline must be taken over the trajectories of this group",
        )
