"""How far the sampler is from the trainer, as two factors that are never mixed up.

    mismatch    rho = prox / mu   same weights, other arithmetic
    staleness   r   = pi / prox   the weights have moved

Both need prox, the trainer's log-probability by the weights that sampled a token. For a token of
lag 0 these are the step's own weights, so the step's forward measures it; for an older one they
were asked once more (`Sample.prox_logprobs`, proximal.py). Where they were not, and where new
weights overtook the turn, the token is in neither statistic, and `mismatch/measured_frac` says how
many are.

Takes: scored micro-batches. Gives: metrics, nothing at all where nothing was measured; an alarm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle.batch import MicroBatch

MAX_LOG_RATIO = 20.0
"""Nats; as in the losses."""

ALARM_NATS = 0.05
ALARM_STEPS = 5
"""A mismatch k3 above ALARM_NATS in so many measured steps in a row raises an alarm. Rounding alone
stays below 1e-3 in bfloat16, and far below that in float32 (docs/parity.md)."""

METRICS: dict[str, str] = {
    "mismatch/measured_frac": "share of the sampled trained tokens whose log-probability the "
    "trainer knows by the very weights that sampled them: all at lag 0, of older tokens those of "
    "the groups that learn.mismatch_share chose; without turns that an update overtook",
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
    return np.where((micro.version == version) & ~micro.overtaken, logp, micro.prox)


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


class Watch:
    """Tells of a mismatch that stays large: sampler and trainer do not compute the same model."""

    def __init__(self) -> None:
        self._steps = 0

    def measure(self, metrics: Mapping[str, float]) -> tuple[str, ...]:
        """Alarms as sentences. A step that measured nothing neither counts nor ends a count."""
        k3 = metrics.get("mismatch/k3_nats")
        if k3 is None:
            return ()
        self._steps = self._steps + 1 if k3 > ALARM_NATS else 0
        if self._steps != ALARM_STEPS:
            return ()
        return (
            f"by the same weights, sampler and trainer were more than {ALARM_NATS:g} nats apart in "
            f"{ALARM_STEPS} measured steps in a row (mismatch/k3_nats {k3:.3g}, mismatch/rho_max "
            f"{metrics['mismatch/rho_max']:.3g}): what is trained is not what sampled. Look for "
            "another dtype or temperature on one side, or bound it with learn.correction",
        )

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"steps": self._steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self._steps = int(state["steps"])


def _clamped(log_ratio: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    bounded = np.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return bounded, np.exp(bounded)


def _k3(log_ratio: NDArray[np.float64]) -> float:
    return float(np.maximum(np.expm1(log_ratio) - log_ratio, 0.0).mean())
