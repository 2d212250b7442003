"""Every metric of a training step: name, unit, definition; and the sums they are made of.

Means are over the trained tokens of the whole step: micro-batches and ranks add up their sums, and
one division follows. What is not defined for a step is absent.

Takes: sums. Gives: a dict of floats by documented name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from treadle.batch import MicroBatch
from treadle.losses.common import MAX_LOG_RATIO
from treadle.schedule.lag import token_lags
from treadle.train.collapse import METRICS as COLLAPSE
from treadle.train.critic import METRICS as CRITIC
from treadle.train.entropy import METRICS as ENTROPY
from treadle.train.kl import METRICS as KL
from treadle.train.mismatch import METRICS as MISMATCH
from treadle.train.mismatch import mismatch_metrics
from treadle.train.optim import Update
from treadle.train.proximal import METRICS as PROXIMAL
from treadle.train.terms import METRICS as TERMS

Scored = tuple[MicroBatch, NDArray[np.float32]]
"""A micro-batch with the trainer's log-probabilities [n] of its targets, before the update."""

METRICS: dict[str, str] = {
    "loss/total": "loss of the step, tokens weighed by its aggregation, in units of the advantage; "
    "its sign and size mean little, only its gradient is used",
    "loss/clipped_frac": "share of trained tokens that the loss clips: weight capped (cispo) or "
    "gradient cut (ppo_clip); lower is better, 0 on-policy",
    "loss/ce_nats": "mean negative log-likelihood of the demonstrated tokens",
    "loss/dropped_positive_frac": "share of the tokens with A > 0 whose gradient the loss drops",
    "loss/dropped_negative_frac": "share of the tokens with A < 0 whose gradient the loss drops",
    "grad/norm": "global L2 norm of the gradient before clipping",
    "optim/lr": "learning rate of this update",
    "optim/updates": "updates applied since the start of the run, this one included",
    "policy/entropy_nats": "mean entropy of the policy at the trained positions of rollouts, or of "
    "demonstrations where there are no others, full vocabulary, float32, at the sampling "
    "temperature, weights before the update; >= 0",
    "policy/kl_k3_nats": "mean k3 estimate of KL(behaviour || policy), weights before the update; "
    ">= 0. At lag 0 it measures the mismatch of engine and trainer, at more lag staleness too",
    "policy/logprob_diff_nats": "mean of log pi - log mu, weights before the update",
    "ratio/mean": "mean importance ratio pi / mu; 1 on-policy",
    "ratio/max": "largest importance ratio pi / mu of a trained token",
    "ratio/ess_frac": "effective sample size (sum r)^2 / (n sum r^2), in (0, 1]; 1 on-policy",
    "lag/mean_versions": "mean lag of the trained tokens: version trained minus version sampled",
    "lag/max_versions": "largest lag of a trained token",
    "advantage/abs_mean": "mean |advantage| of the trained tokens",
    "tokens/trained": "trained tokens of rollouts of the step: N of token_mean",
    "tokens/demonstrated": "trained tokens of demonstrations of the step",
    "tokens/packed": "tokens computed, shared prompts counted once per micro-batch",
    "batch/rows": "training rows (branches) of the step",
    "batch/micro_batches": "forward and backward passes of the step",
    "batch/oversized": "micro-batches of one row that alone exceeds learn.micro_tokens",
    "step/skipped_nonfinite": "1 when loss or gradient was not finite and the update was skipped",
    "time/pack_s": "wall clock of packing",
    "time/forward_s": "wall clock of this rank's forwards, as the host sees it",
    "time/backward_s": "wall clock of this rank's losses and backwards, as the host sees it",
    "time/optimizer_s": "wall clock of clipping, AdamW and the policy's refresh",
    "parity/mean_abs_nats": "mean |trainer - sampler logprob| of the guarded step, its own tokens",
    "parity/max_abs_nats": "largest |trainer - sampler logprob| of the guarded step",
    **ENTROPY,
    **KL,
    **TERMS,
    **MISMATCH,
    **PROXIMAL,
    **CRITIC,
    **COLLAPSE,
    "time/critic_s": "wall clock of the critic: values, advantages and its updates",
    "correction/weight_mean": "mean factor by which a correction multiplies a token's weight, "
    "dropped tokens as 0, over tokens whose algorithm has one",
    "correction/ess_frac": "effective sample size (sum w)^2 / (n sum w^2) of these factors, in "
    "(0, 1]",
    "correction/dropped_positive_frac": "share of the tokens with A > 0 that a correction drops; "
    "they stay in the denominators",
    "correction/dropped_negative_frac": "share of the tokens with A < 0 that a correction drops",
    "correction/rejected_rows": "rows that left the step, and its denominators, as a whole",
    "correction/rejected_rows_frac": "share of the step's rows that left it",
    "correction/rejected_tokens": "trained tokens of these rows",
}
"""What docs/metrics.md prints. Absent from a step: demonstrations, corrections, controllers, KL
terms and critics it does not have, gradients of a step in which a critic learnt alone, factors
that were not measured or took no forward of their own, parity of a step that was not guarded."""


class Sums:
    """Sums by name; adding is all they can do until the step divides."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def add(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.values[name] = self.values.get(name, 0.0) + float(value)

    def __getitem__(self, name: str) -> float:
        return self.values.get(name, 0.0)

    def per(self, name: str, count: str) -> float:
        """One sum over another; 0 when there is nothing to count."""
        return self[name] / self[count] if self[count] else 0.0


def step_metrics(
    scored: Sequence[Scored], sums: Sums, version: int, update: Update | None
) -> dict[str, float]:
    """Divide the sums of a step once, and add what is not a sum.

    Args:
        scored: every micro-batch of the step.
        sums: of the loss's statistics, entropies and times.
        version: of the weights before the update.
        update: what the optimiser did; None = it was not asked.
    """
    micros = [micro for micro, _ in scored]
    metrics = {
        "loss/total": sums["loss"],
        # Of rollouts, where there are any: demonstrations have a temperature of their own.
        "policy/entropy_nats": sums.per("sampled_entropy", "num_tokens")
        if sums["num_tokens"]
        else sums["entropy"] / sum(micro.num_trained for micro in micros),
        "tokens/trained": sums["num_tokens"],
        "tokens/packed": float(sum(m.num_tokens for m in micros)),
        "batch/micro_batches": float(len(micros)),
        "step/skipped_nonfinite": float(update is not None and not update.applied),
        "time/pack_s": sums["time/pack_s"],
        "time/forward_s": sums["time/forward_s"],
        "time/backward_s": sums["time/backward_s"],
        "time/optimizer_s": sums["time/optimizer_s"],
    }
    if update is not None:
        metrics |= {"grad/norm": update.grad_norm, "optim/lr": update.lr}
    if sums["time/critic_s"]:
        metrics["time/critic_s"] = sums["time/critic_s"]
    if sums["num_tokens"]:
        metrics |= _of_rollouts(scored, sums, version) | mismatch_metrics(scored, version)
    if sums["ce_tokens"]:
        metrics["loss/ce_nats"] = sums.per("ce_nll", "ce_tokens")
        metrics["tokens/demonstrated"] = sums["ce_tokens"]
    if sums["corrected_tokens"]:
        metrics |= {
            "correction/weight_mean": sums.per("correction", "corrected_tokens"),
            "correction/ess_frac": _ess(sums, "correction", "corrected_tokens"),
            "correction/dropped_positive_frac": sums.per("masked_positive", "positive_tokens"),
            "correction/dropped_negative_frac": sums.per("masked_negative", "negative_tokens"),
        }
    if sums["screened_rows"]:
        metrics |= {
            "correction/rejected_rows": sums["rejected_rows"],
            "correction/rejected_rows_frac": sums.per("rejected_rows", "screened_rows"),
            "correction/rejected_tokens": sums["rejected_tokens"],
        }
    return metrics


def _of_rollouts(scored: Sequence[Scored], sums: Sums, version: int) -> dict[str, float]:
    """What is defined for sampled tokens alone."""
    pi, mu, advantage, versions = (
        np.concatenate(parts)
        for parts in zip(
            *((logp, m.behaviour, m.advantage, m.version) for m, logp in scored), strict=True
        )
    )
    sampled = versions >= 0
    lags = token_lags(versions.tolist(), training_version=version)
    largest = min(float((pi - mu)[sampled].max()), MAX_LOG_RATIO)  # as the losses clamp it
    return {
        "loss/clipped_frac": sums.per("clipped_tokens", "num_tokens"),
        "loss/dropped_positive_frac": sums.per("dropped_positive", "positive_tokens"),
        "loss/dropped_negative_frac": sums.per("dropped_negative", "negative_tokens"),
        "policy/kl_k3_nats": sums.per("k3", "num_tokens"),
        "policy/logprob_diff_nats": sums.per("logprob_diff", "num_tokens"),
        "ratio/mean": sums.per("ratio", "num_tokens"),
        "ratio/max": math.exp(largest),
        "ratio/ess_frac": _ess(sums, "ratio", "num_tokens"),
        "lag/mean_versions": sum(lags) / len(lags),
        "lag/max_versions": float(max(lags)),
        "advantage/abs_mean": float(np.abs(advantage[sampled]).mean()),
    }


def _ess(sums: Sums, weight: str, count: str) -> float:
    """(sum w)^2 / (n sum w^2); 0 where all weights are 0."""
    squares = sums[count] * sums[f"{weight}_sq"]
    return sums[weight] ** 2 / squares if squares else 0.0
