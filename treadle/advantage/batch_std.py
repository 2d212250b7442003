"""Reward minus the mean of its group, divided by one deviation of the whole batch.

Guarantees: sums to zero over each group; about one in size whatever the reward's unit, and unlike
GRPO one factor for all groups, so that easy and hard tasks keep their weights.

Takes: rewards of all groups that can teach. Gives: dimensionless advantages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from treadle.advantage.group_mean import group_mean

EPSILON = 1e-6
"""Added to the deviation, in reward units."""


def batch_std(groups: Sequence[Sequence[float]]) -> list[list[float]]:
    """A_i = (R_i - mean of its group) / (s + EPSILON), s the deviation of all these differences
    over the batch, with the unbiased denominator N - 1.

    Args:
        groups: rewards of each group of two or more whose rewards are not all equal: the others
            would only shrink s.

    Source: ScaleRL (arXiv:2510.13786), batch-level normalisation. Lite-PPO (arXiv:2508.08221) takes
        the deviation of the rewards themselves, spread between tasks included.
    """
    centred = [group_mean(rewards) for rewards in groups]
    flat = [c for group in centred for c in group]
    if not flat:
        return []
    deviation = math.sqrt(math.fsum(c * c for c in flat) / (len(flat) - 1))
    return [[c / (deviation + EPSILON) for c in group] for group in centred]
