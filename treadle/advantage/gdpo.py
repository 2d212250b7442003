"""Several rewards, each normalised in its group before they are added (GDPO).

Guarantees: sums to zero over each group; a reward of large spread does not drown one of small
spread, as it does when rewards are added first: what each may say is its weight. A reward that is
equal over a group says nothing there.

Takes: named rewards of all groups, and weights. Gives: dimensionless advantages, deviation 1 over
the rollouts of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from treadle.advantage.grpo import grpo
from treadle.advantage.judged import equal
from treadle.advantage.whiten import whiten


def gdpo(
    groups: Sequence[Sequence[Mapping[str, float]]], weights: Mapping[str, float]
) -> list[list[float]]:
    """A_i = whiten(sum_k w_k * grpo(R_k)_i), the whitening over all rollouts of the batch.

    Args:
        groups: of each group of two or more, one mapping per rollout that holds every named
            reward, finite.
        weights: w by name of the reward.

    Source: GDPO (arXiv:2601.05242). Its batch normalisation is over rollouts here, as in TRL; verl
        takes it over tokens.
    """
    sums = [_weighted(group, weights) for group in groups]
    flat = whiten([x for group in sums for x in group], [1] * sum(map(len, sums))).tolist()
    out: list[list[float]] = []
    for group in sums:
        out.append(flat[: len(group)])
        del flat[: len(group)]
    return out


def _weighted(group: Sequence[Mapping[str, float]], weights: Mapping[str, float]) -> list[float]:
    columns = []
    for name, weight in weights.items():
        rewards = [parts[name] for parts in group]
        values = [0.0] * len(rewards) if equal(rewards) else grpo(rewards)
        columns.append([weight * value for value in values])
    return [math.fsum(row) for row in zip(*columns, strict=True)]
