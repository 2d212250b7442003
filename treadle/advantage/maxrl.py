"""Reward minus the mean of its group, divided by that mean (MaxRL).

Guarantees: sums to zero over the group. Dividing by the mean weighs a task by about 1 / p, p its
pass rate: the gradient is that of a truncated log p, so rare successes count most. A shift of all
rewards changes it, a common factor does not.

Takes: rewards of one group, none below 0. Gives: dimensionless advantages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from treadle.errors import ConfigError, setting

EPSILON = 1e-6
"""Added to the mean, in reward units."""


def maxrl(rewards: Sequence[float]) -> list[float]:
    """A_i = (R_i - mean(R)) / (mean(R) + EPSILON); 0 where the mean is 0.

    Args:
        rewards: one reward >= 0 per rollout, at least two.

    Raises ConfigError: a reward is below 0, where 1 / mean has no meaning and may flip the sign.

    Source: MaxRL (arXiv:2602.02710), the normaliser of its on-policy estimator.
    """
    if min(rewards) < 0:
        raise ConfigError(
            f"advantage `maxrl` divides by the mean reward of a group and needs rewards >= 0, "
            f"got {min(rewards):g}",
            hint=f"pay 0 instead of a penalty, or {setting('learn.advantage=group_mean')}",
        )
    mean = math.fsum(rewards) / len(rewards)
    if mean <= 0:
        return [0.0] * len(rewards)
    return [(reward - mean) / (mean + EPSILON) for reward in rewards]
