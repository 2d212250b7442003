"""REINFORCE++: the return of each token, whitened over all trained tokens of the global batch.

Guarantees: works with one rollout per task; tokens that are not trained are stepped over, in
returns and in statistics; a long rollout weighs in the statistics by its tokens. The variant
with a baseline takes the group's mean from each outcome first.

Takes: outcomes and token counts, or rewards per token. Gives: dimensionless advantages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from treadle.advantage.gae import gae
from treadle.advantage.group_mean import group_mean
from treadle.advantage.judged import Judged, equal, judged
from treadle.advantage.tokens import chain, unchain
from treadle.advantage.whiten import whiten
from treadle.errors import ContractError
from treadle.types import Group


def reinforce_pp(groups: Sequence[Judged], *, baseline: bool) -> list[list[float]]:
    """With gamma = 1 and no reward but the outcome: A_i = (R_i - mean) / deviation, both over
    tokens. Every token of a rollout has the same return, so one number stands for all of them.

    Args:
        baseline: True = R_i minus the mean of its group in place of R_i.

    Source: REINFORCE++ and REINFORCE++-baseline (arXiv:2501.03262).
    """
    outcomes = [_outcomes(group.rewards, baseline) for group in groups]
    flat = whiten(
        [x for group in outcomes for x in group], [n for group in groups for n in group.lengths]
    ).tolist()
    out: list[list[float]] = []
    for group in outcomes:
        out.append(flat[: len(group)])
        del flat[: len(group)]
    return out


def token_returns(rewards: ArrayLike, mask: ArrayLike, *, gamma: float) -> NDArray[np.float64]:
    """G_t = r_t + gamma * G_{t+1} over trained tokens; NaN on the others, whose rewards are never
    read. GAE without a critic.

    Args:
        rewards: [..., tokens].
        mask: [..., tokens], True on trained tokens.
        gamma: discount per trained token, in [0, 1].
    """
    return gae(rewards, np.zeros(np.shape(rewards)), mask, gamma=gamma, lam=1.0)[0]


def token_advantages(
    groups: Sequence[Group],
    penalties: Mapping[str, Mapping[int, Sequence[float]]],
    *,
    gamma: float = 1.0,
    baseline: bool = False,
) -> dict[str, dict[int, tuple[float, ...]]]:
    """REINFORCE++ with a reward per token, e.g. r_t = -beta * k1_t for a KL in the reward.

    Args:
        groups: all groups of the step.
        penalties: r_t by trajectory id and node id, one per token; read where trained alone. The
            outcome is added to the last trained token of the trajectory.
        gamma: discount per trained token, in [0, 1].
        baseline: True = outcomes minus the mean of their group.

    Returns:
        One advantage per token by trajectory id and node id; NaN where not trained.
    """
    found = []
    for group in groups:
        members, view = judged(group)
        for trajectory, outcome in zip(members, _outcomes(view.rewards, baseline), strict=True):
            mask = chain(trajectory)
            given = penalties.get(trajectory.id, {})
            rewards = [x for n in trajectory.nodes for x in given.get(n.id, [0.0] * len(n.ids))]
            if len(rewards) != len(mask):
                raise ContractError(
                    f"trajectory {trajectory.id} has {len(mask)} tokens, but {len(rewards)} "
                    "rewards per token"
                )
            rewards[int(np.flatnonzero(mask)[-1])] += outcome
            found.append((trajectory, mask, token_returns(rewards, mask, gamma=gamma)))
    if not found:
        return {}
    masks = [mask for _, mask, _ in found]
    flat = whiten(np.concatenate([returns for _, _, returns in found]), np.concatenate(masks))
    ends = np.cumsum([len(mask) for mask in masks])[:-1]
    pieces = zip(found, np.split(flat, ends), strict=True)
    return {trajectory.id: unchain(trajectory, piece) for (trajectory, _, _), piece in pieces}


def _outcomes(rewards: Sequence[float], baseline: bool) -> list[float]:
    if not baseline:
        return list(rewards)
    return [0.0] * len(rewards) if equal(rewards) else group_mean(rewards)
