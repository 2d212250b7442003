"""Generalised advantage estimation over a rollout's own tokens, skipping observations (PPO).

Guarantees: a token that is not trained (prompt, tool output) is stepped over as if it were not
there: neither its value nor its reward enters, NaN included, and the estimate of the token before
it continues with the token after. So splitting a turn by an observation changes nothing.

Takes: rewards, values and the trained mask. Gives: advantages and returns, NaN where not trained.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from treadle.errors import ContractError


def gae(
    rewards: ArrayLike, values: ArrayLike, mask: ArrayLike, *, gamma: float = 1.0, lam: float = 1.0
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """A_t = sum_k (gamma * lam)^k delta_{t+k}, delta_t = r_t + gamma * V_{t+1} - V_t, over trained
    tokens alone; returns A_t + V_t.

    Args:
        rewards: [..., tokens], reward units. An outcome belongs on the last trained token: what
            stands on a token that is not trained is never read.
        values: [..., tokens], the critic's V before each token; the value after the last is 0.
        mask: [..., tokens], True on trained tokens.
        gamma: discount per trained token, in [0, 1].
        lam: lambda, in [0, 1]; 1 = the return minus the value, 0 = one step.

    Returns:
        Advantages, not whitened (see `whiten`), and returns: the critic's targets.

    Source: GAE (arXiv:1506.02438). Its recursion with skipped observations is that of verl and of
        GLM-5's report.
    """
    r, v = np.asarray(rewards, dtype=np.float64), np.asarray(values, dtype=np.float64)
    trained = np.asarray(mask, dtype=bool)
    if not r.shape == v.shape == trained.shape or r.ndim == 0:
        raise ContractError(
            f"rewards, values and mask must have one shape, got {r.shape}, {v.shape}, "
            f"{trained.shape}"
        )
    for name, array in (("rewards", r), ("values", v)):
        bad = trained & ~np.isfinite(array)
        if bad.any():
            raise ContractError(
                f"{name} of {int(bad.sum())} of {int(trained.sum())} trained tokens are not "
                f"finite, first at index {tuple(np.argwhere(bad)[0].tolist())}"
            )
    r, v = np.where(trained, r, 0.0), np.where(trained, v, 0.0)
    advantages = np.full(r.shape, np.nan)
    next_value, ahead = np.zeros(r.shape[:-1]), np.zeros(r.shape[:-1])
    for t in range(r.shape[-1] - 1, -1, -1):
        here = trained[..., t]
        delta = r[..., t] + gamma * next_value - v[..., t]
        ahead = np.where(here, delta + gamma * lam * ahead, ahead)
        next_value = np.where(here, v[..., t], next_value)
        advantages[..., t] = np.where(here, ahead, np.nan)
    return advantages, np.where(trained, advantages + v, np.nan)
