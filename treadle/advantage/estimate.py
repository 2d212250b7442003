"""The estimators by name, and the one function that a training step calls.

Guarantees: see the package. What an estimator promises of a group (that its advantages, or its
advantages times trained tokens, sum to 0) is checked on every call; one that compares the rollouts
of a group never sees a group in which there is nothing to compare.

Takes: Groups with rewards. Gives: advantages by trajectory id.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from treadle.advantage.batch_std import batch_std
from treadle.advantage.gdpo import gdpo
from treadle.advantage.group_mean import group_mean
from treadle.advantage.grpo import grpo
from treadle.advantage.judged import Judged, comparable, judged
from treadle.advantage.maxrl import maxrl
from treadle.advantage.opo import opo
from treadle.advantage.reinforce import batch_mean, reinforce
from treadle.advantage.reinforce_pp import reinforce_pp
from treadle.advantage.rloo import rloo
from treadle.errors import ConfigError, ContractError, did_you_mean
from treadle.types import Group, Party, Trajectory

SUM_TOLERANCE = 1e-6
"""Allowed |sum of a group's advantages| as a share of its largest |advantage|."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimator:
    """How the rollouts of a batch become advantages, and what may be expected of them."""

    of_batch: Callable[[Sequence[Judged], float, Mapping[str, float]], list[list[float]]]
    """Groups, running baseline and weights of rewards to the advantages of each group."""
    balance: str = ""
    """What sums to 0 in every group: advantages of "rollouts", or times their "tokens"."""


def _each(of_group: Callable[[Sequence[float]], list[float]]) -> Estimator:
    return Estimator(
        of_batch=lambda groups, baseline, weights: [of_group(g.rewards) for g in groups],
        balance="rollouts",
    )


def _minus_nothing(groups: Sequence[Judged], running: float, weights: object) -> list[list[float]]:
    return [reinforce(g.rewards) for g in groups]


def _minus_mean(groups: Sequence[Judged], running: float, weights: object) -> list[list[float]]:
    mean = batch_mean(g.rewards for g in groups)
    return [reinforce(g.rewards, mean) for g in groups]


def _minus_running(groups: Sequence[Judged], running: float, weights: object) -> list[list[float]]:
    return [reinforce(g.rewards, running) for g in groups]


ESTIMATORS: dict[str, Estimator] = {
    "group_mean": _each(group_mean),
    "rloo": _each(rloo),
    "grpo": _each(grpo),
    "maxrl": _each(maxrl),
    "opo": Estimator(
        of_batch=lambda groups, baseline, weights: [opo(g.rewards, g.lengths) for g in groups],
        balance="tokens",
    ),
    "batch_std": Estimator(
        of_batch=lambda groups, baseline, weights: batch_std([g.rewards for g in groups]),
        balance="rollouts",
    ),
    "gdpo": Estimator(
        of_batch=lambda groups, baseline, weights: gdpo([g.parts for g in groups], weights),
        balance="rollouts",
    ),
    "reinforce": Estimator(of_batch=_minus_nothing),
    "reinforce_batch_mean": Estimator(of_batch=_minus_mean),
    "reinforce_running": Estimator(of_batch=_minus_running),
    "reinforce_pp": Estimator(
        of_batch=lambda groups, baseline, weights: reinforce_pp(groups, baseline=False)
    ),
    "reinforce_pp_baseline": Estimator(
        of_batch=lambda groups, baseline, weights: reinforce_pp(groups, baseline=True)
    ),
    "gae": Estimator(of_batch=_minus_nothing),
}
"""By the name that a config gives; those of GROUP_RELATIVE compare the rollouts of a group. `gae`
gives the outcome as it is: values, and so advantages, are the trainer's to compute, as they are by
the critic of that moment (train/critic.py)."""


def of_party(
    groups: Sequence[Group],
    estimator: str,
    party: Party,
    baseline: float,
    weights: Mapping[str, float],
) -> dict[str, float]:
    """One advantage for each rollout that counts for `party`, by trajectory id."""
    out: dict[str, float] = {}
    kept: list[tuple[Group, list[Trajectory], Judged]] = []
    for group in groups:
        members, view = judged(group, party)
        for trajectory in members:
            if trajectory.id in out:
                raise ContractError(
                    f"trajectory {trajectory.id} is in the batch twice (again in group "
                    f"{group.ordinal}): it would be trained twice"
                )
            out[trajectory.id] = 0.0
        if comparable(group, members, view, estimator, weights):
            kept.append((group, members, view))
    if not kept:
        return out
    views = [view for _, _, view in kept]
    results = find(estimator).of_batch(views, baseline, weights)
    for (group, members, view), values in zip(kept, results, strict=True):
        _check(group, estimator, view, values)
        out |= {t.id: value for t, value in zip(members, values, strict=True)}
    return out


def find(estimator: str) -> Estimator:
    """Raises ConfigError with the nearest name when there is none of this name."""
    if estimator not in ESTIMATORS:
        raise ConfigError(
            f"unknown advantage estimator `{estimator}`", hint=did_you_mean(estimator, ESTIMATORS)
        )
    return ESTIMATORS[estimator]


def _check(group: Group, estimator: str, view: Judged, values: Sequence[float]) -> None:
    balance = ESTIMATORS[estimator].balance
    counts = view.lengths if balance == "tokens" else (1,) * len(values)
    terms = [count * value for count, value in zip(counts, values, strict=True)]
    where = (
        f"advantages of group {group.ordinal} (task {group.task.id}, {len(values)} trajectories) "
        f"by `{estimator}`"
    )
    if not all(map(math.isfinite, terms)):
        raise ContractError(f"{where} are not all finite: {list(values)}")
    total, scale = math.fsum(terms), max(map(abs, terms))
    if balance and abs(total) > SUM_TOLERANCE * scale:
        raise ContractError(
            f"{where} sum to {total:g}, expected 0 within {SUM_TOLERANCE:g} x {scale:g}",
            hint="the baseline must be taken over the trajectories of this group",
        )
