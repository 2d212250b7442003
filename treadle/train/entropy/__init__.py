"""Entropy as a dial: methods that hold it, their controllers, and the state of a run.

Takes: an EntropyConfig, packed vectors, one mean entropy per step. Gives: what a step trains with.
"""

from treadle.train.entropy.advantage import repo_d, repo_r
from treadle.train.entropy.control import METRICS, Dial, EntropyControl
from treadle.train.entropy.controllers import (
    next_by_rate,
    next_by_steps,
    next_zeta,
    target_at,
)
from treadle.train.entropy.covariance import canonical_order, clip_cov, covariance, kl_cov

__all__ = [
    "METRICS",
    "Dial",
    "EntropyControl",
    "canonical_order",
    "clip_cov",
    "covariance",
    "kl_cov",
    "next_by_rate",
    "next_by_steps",
    "next_zeta",
    "repo_d",
    "repo_r",
    "target_at",
]
