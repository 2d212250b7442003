"""Reward minus the mean of its group (Dr.GRPO's advantage).

Guarantees: sums to zero over the group; not scaled, so a group of easy or hard tasks weighs no
more than its rewards differ.

Takes: rewards of one group. Gives: advantages in reward units.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def group_mean(rewards: Sequence[float]) -> list[float]:
    """A_i = R_i - mean(R).

    Args:
        rewards: one finite reward per rollout, at least two.

    Returns:
        One advantage per rollout, in reward units.

    Source: Dr.GRPO (arXiv:2503.20783), its advantage without the division by the deviation.
    """
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]
