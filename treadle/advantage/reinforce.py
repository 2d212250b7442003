"""Reward minus a number that is not of its group: REINFORCE, with its baselines.

Guarantees: works with one rollout per task; never scaled. With baseline 0 nothing is subtracted;
the batch's mean is taken over rollouts of all groups, each once; the running mean is of *earlier*
steps alone, so it is independent of the rewards it is subtracted from, and the gradient unbiased.

Takes: rewards. Gives: advantages in reward units; the running mean's next value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from treadle.advantage.judged import judged
from treadle.types import Group, Party

DECAY = 0.95
"""Of the running mean, per step; a rollout of 20 steps ago weighs about a third."""

BASELINE = "advantage/{party}_baseline"
"""Metric that holds the running mean after the step; resume reads it from the ledger."""


def reinforce(rewards: Sequence[float], baseline: float = 0.0) -> list[float]:
    """A_i = R_i - b.

    Args:
        rewards: one finite reward per rollout.
        baseline: b, in reward units.

    Source: REINFORCE (Williams, Machine Learning 8, 1992), with its reinforcement baseline.
    """
    return [reward - baseline for reward in rewards]


def batch_mean(groups: Iterable[Sequence[float]]) -> float:
    """Mean reward over the rollouts of all groups; not the mean of the groups' means."""
    rewards = [reward for group in groups for reward in group]
    return math.fsum(rewards) / len(rewards)


def next_baseline(previous: float | None, mean: float, decay: float = DECAY) -> float:
    """decay * previous + (1 - decay) * mean; the first step's own mean where there is no previous.

    Starting from 0 instead would pull the baseline to 0 for the first 1 / (1 - decay) steps.

    Source: role-conditioned baseline of SPIRAL (arXiv:2506.24119), decay 0.95; there from 0.
    """
    return mean if previous is None else decay * previous + (1 - decay) * mean


def baseline_metrics(
    groups: Sequence[Group], previous: Mapping[Party, float], decay: float = DECAY
) -> dict[str, float]:
    """The running mean of each party after a step that trained `groups`, as metrics of the step.

    Args:
        groups: of the step.
        previous: `running_baselines` of the step before; empty before the first.

    Returns:
        BASELINE by party; a party that no rollout of this step judged keeps its value.
    """
    out = {party: value for party, value in previous.items()}
    for party in Party:
        rewards = [judged(group, party)[1].rewards for group in groups]
        if any(rewards):
            out[party] = next_baseline(previous.get(party), batch_mean(rewards), decay)
    return {BASELINE.format(party=party): value for party, value in out.items()}


def running_baselines(metrics: Mapping[str, float]) -> dict[Party, float]:
    """The running means that `baseline_metrics` stored with a step; what `advantages` takes."""
    names = {BASELINE.format(party=party): party for party in Party}
    return {party: metrics[name] for name, party in names.items() if name in metrics}
