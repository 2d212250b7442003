"""Reward minus the mean of its group, divided by the group's standard deviation (GRPO).

Guarantees: sums to zero over the group; about one in size whatever the reward's unit. The division
weighs very easy and very hard tasks up (their deviation is small): see Dr.GRPO's criticism.

Takes: rewards of one group. Gives: dimensionless advantages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

EPSILON = 1e-6
"""Added to the deviation, in reward units; the paper has none, TRL uses 1e-4."""


def grpo(rewards: Sequence[float]) -> list[float]:
    """A_i = (R_i - mean(R)) / (std(R) + EPSILON), std with the unbiased denominator G - 1.

    Args:
        rewards: one finite reward per rollout, at least two.

    Returns:
        One advantage per rollout, dimensionless.

    Source: GRPO (arXiv:2402.03300), outcome supervision. The paper does not say which standard
        deviation; this is the one of the common implementations (ddof = 1).
    """
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    deviation = math.sqrt(math.fsum(c * c for c in centred) / (len(rewards) - 1))
    return [c / (deviation + EPSILON) for c in centred]
