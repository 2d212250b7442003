"""Reward minus the mean of the *other* rollouts of its group (leave one out).

Guarantees: sums to zero over the group; the baseline of a rollout never contains its own reward,
so it is unbiased. Equal to the group mean's advantage times G / (G - 1).

Takes: rewards of one group. Gives: advantages in reward units.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def rloo(rewards: Sequence[float]) -> list[float]:
    """A_i = R_i - mean of R_j over j != i.

    Args:
        rewards: one finite reward per rollout, at least two.

    Returns:
        One advantage per rollout, in reward units.

    Source: RLOO (arXiv:2402.14740), the leave-one-out baseline.
    """
    total = math.fsum(rewards)
    others = len(rewards) - 1
    return [reward - (total - reward) / others for reward in rewards]
