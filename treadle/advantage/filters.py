"""Which groups of a batch are worth training on, from their rewards alone.

Guarantees: pure functions of the groups; the order in which they are given changes nothing; groups
in which there is nothing to compare are counted by cause, never mixed with the others.

Takes: Groups with rewards. Gives: yes or no, indices, counts as metrics.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from treadle.advantage.judged import Judged, equal, judged
from treadle.errors import ConfigError
from treadle.types import Group

KEEP = 0.9
"""Share of the summed deviation that is kept."""

SLACK = 0.01
"""Of the sum that is to be reached, in reward units: a group that would add less than this to
complete it is left out."""


def zero_variance(group: Group) -> bool:
    """True when no trajectory of the group can teach anything by comparison: fewer than two count,
    or the rewards of those that count are equal within a tolerance."""
    return equal(judged(group)[1].rewards)


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """What the spread filter keeps."""

    indices: tuple[int, ...]
    """Of the groups, ascending."""
    scale: float
    """sqrt(kept / all): an optional factor of the advantages, so that a step of few groups, whose
    gradient is noisier, is a smaller one."""


def top_spread(
    groups: Sequence[Group], keep: float = KEEP, slack: float = SLACK, least: int = 1
) -> Kept:
    """The groups of largest reward deviation that together have `keep` of its sum.

    Deviations are ranked from the largest (ties by ordinal) and added until the sum reaches
    `keep` * total - `slack`. Groups with equal rewards are never kept, the first `least` groups
    with any spread always are.

    Args:
        groups: of one step.
        keep: in (0, 1]; 1 keeps every group with any spread.
        slack: in reward units.
        least: number of groups with any spread that are kept whatever their share.

    Raises ConfigError: `keep` is out of range. ContractError: a reward is not finite.

    Source: RAGEN-2 (arXiv:2604.06268), its reward-deviation filter with the score-sum rule. There
        rewards whose deviations sum to less than `slack` / `keep` select no group at all.
    """
    if not 0 < keep <= 1:
        raise ConfigError(f"the kept share of the summed deviation must be in (0, 1], got {keep}")
    spreads = [_deviation(judged(group)[1]) for group in groups]
    order = sorted(range(len(groups)), key=lambda i: (-spreads[i], groups[i].ordinal))
    target = math.inf if keep == 1 else keep * math.fsum(spreads) - slack
    chosen: list[int] = []
    for index in order:
        reached = math.fsum(spreads[i] for i in chosen) >= target
        if spreads[index] <= 0 or (len(chosen) >= least and reached):
            break
        chosen.append(index)
    return Kept(
        indices=tuple(sorted(chosen)),
        scale=math.sqrt(len(chosen) / len(groups)) if groups else 1.0,
    )


def group_stats(groups: Sequence[Group]) -> dict[str, float]:
    """Counts behind the advantages, as metrics.

    Returns:
        `advantage/groups`, `advantage/singleton_groups` (exactly one trajectory counts),
        `advantage/empty_groups` (none counts), `advantage/zero_variance_groups` (two or more
        count and their rewards are equal) and `advantage/left_out_trajectories` (unscored,
        failed, aborted or without trained tokens).
    """
    sizes = [len(group.scored) for group in groups]
    same = sum(len(g.scored) > 1 and zero_variance(g) for g in groups)
    left_out = sum(len(group.trajectories) for group in groups) - sum(sizes)
    return {
        "advantage/groups": float(len(groups)),
        "advantage/singleton_groups": float(sizes.count(1)),
        "advantage/empty_groups": float(sizes.count(0)),
        "advantage/zero_variance_groups": float(same),
        "advantage/left_out_trajectories": float(left_out),
    }


def _deviation(view: Judged) -> float:
    """Unbiased, 0 where the rewards are equal."""
    if equal(view.rewards):
        return 0.0
    mean = math.fsum(view.rewards) / len(view.rewards)
    return math.sqrt(
        math.fsum((r - mean) * (r - mean) for r in view.rewards) / (len(view.rewards) - 1)
    )
