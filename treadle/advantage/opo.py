"""Reward minus the length-weighted mean of its group (OPO): the baseline of least variance.

Guarantees: length-weighted, it sums to zero over the group (not over rollouts); never scaled.
Where all rollouts are equally long it is the group mean's advantage.

Takes: rewards and trained-token counts of one group. Gives: advantages in reward units.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def opo(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """A_i = R_i - sum_j len_j R_j / sum_j len_j.

    Args:
        rewards: one finite reward per rollout, at least two.
        lengths: trained tokens of each rollout, >= 1; observations do not count.

    Source: OPO (arXiv:2505.23585), the optimal baseline under the assumption that the squared norm
        of a rollout's gradient grows with its length. The paper has exact on-policy batches, no
        deviation, no KL and no entropy term.
    """
    total = sum(lengths)
    weighted = (length * reward for length, reward in zip(lengths, rewards, strict=True))
    baseline = math.fsum(weighted) / total
    return [reward - baseline for reward in rewards]
