"""How far the sampler is from the trainer, as two factors that are never mixed up.

    mismatch    rho = prox / mu   same weights, other arithmetic
    staleness   r   = pi / prox   the weights have moved

Both need prox, the trainer's log-probability by the weights that sampled a token. For a token of
lag 0 these are the step's own weights, so the step's forward measures it; for an older one it must
have been measured when it was sampled (`Sample.prox_logprobs`). Where it was not, the token is in
neither statistic, and `mismatch/measured_frac` says how many are.

Takes: scored micro-batches. Gives: metrics; nothing at all where nothing was measured.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from treadle.batch import MicroBatch

MAX_LOG_RATIO = 20.0
"""Nats; as in the losses."""

METRICS: dict[str, str] = {
    "mismatch/measured_frac": "share of the sampled trained tokens whose log-probability the "
    "trainer knows by the very weights that sampled them: all at lag 0",
    "mismatch/rho_mean": "mean of rho = trainer's over sampler's probability by the same weights, "
    "over measured tokens",
    "mismatch/rho_min": "smallest of these",
    "mismatch/rho_max": "largest of these",
    "mismatch/k3_nats": "mean rho - 1 - log rho of measured tokens: KL(sampler || trainer) by the "
    "same weights; >= 0",
    "staleness/ratio_mean": "mean of r = probability by the weights before the update over that "
    "by the weights that sampled, both the trainer's, over measured tokens; 1 at lag 0",
    "staleness/ratio_max": "largest of these",
    "staleness/k3_nats": "mean r - 1 - log r of measured tokens; >= 0, 0 at lag 0",
}


def prox_of(micro: MicroBatch, logp: NDArray[np.float32], version: int) -> NDArray[np.float32]:
    """log prox [n] in nats; NaN where it was not measured."""
    return np.where(micro.version == version, logp, micro.prox)


def mismatch_metrics(
    scored: Sequence[tuple[MicroBatch, NDArray[np.float32]]], version: int
) -> dict[str, float]:
    """The METRICS of a step.

    Args:
        scored: micro-batches with the trainer's log-probabilities [n] before the update.
        version: of the weights that made them.
    """
    pi, mu, prox = (
        np.concatenate(parts).astype(np.float64)
        for parts in zip(
            *((logp, micro.behaviour, prox_of(micro, logp, version)) for micro, logp in scored),
            strict=True,
        )
    )
    sampled = np.isfinite(mu)
    measured = sampled & np.isfinite(prox) & np.isfinite(pi)
    if not measured.any():
        return {"mismatch/measured_frac": 0.0} if sampled.any() else {}
    log_rho, rho = _clamped(prox[measured] - mu[measured])
    log_r, r = _clamped(pi[measured] - prox[measured])
    return {
        "mismatch/measured_frac": float(measured.sum() / sampled.sum()),
        "mismatch/rho_mean": float(rho.mean()),
        "mismatch/rho_min": float(rho.min()),
        "mismatch/rho_max": float(rho.max()),
        "mismatch/k3_nats": _k3(log_rho),
        "staleness/ratio_mean": float(r.mean()),
        "staleness/ratio_max": float(r.max()),
        "staleness/k3_nats": _k3(log_r),
    }


def _clamped(log_ratio: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    bounded = np.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return bounded, np.exp(bounded)


def _k3(log_ratio: NDArray[np.float64]) -> float:
    return float(np.maximum(np.expm1(log_ratio) - log_ratio, 0.0).mean())
