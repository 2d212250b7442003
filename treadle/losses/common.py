"""What every policy loss shares: its output, its checks, the safe log-ratio and its diagnostics.

Guarantees: a value at an untrained position, NaN included, reaches neither loss, gradient nor
statistic; ratios are finite whatever the sampler reported.

Takes: packed vectors of one micro-batch. Gives: LossOutput and the pieces to build one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from treadle.errors import ContractError

MAX_LOG_RATIO = 20.0
"""Nats. exp(20) is about 5e8: finite in float32, so one bad token cannot make the step inf."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOutput:
    loss: Float[Tensor, ""]
    """Per trained token of the whole step; the micro-batches' losses add up to the step's."""
    stats: dict[str, Float[Tensor, ""]]
    """Detached sums over the trained tokens of this micro-batch, never means: they add up, and
    the trainer divides once per step."""


def check_inputs(
    logp: Tensor, behaviour_logp: Tensor, advantage: Tensor, trained: Tensor, num_global_tokens: int
) -> None:
    """Raises ContractError: shapes differ, N < 1, or a trained token lacks what it needs."""
    vectors = (logp, behaviour_logp, advantage, trained)
    if logp.ndim != 1 or any(v.shape != logp.shape for v in vectors):
        raise ContractError(
            f"expected four vectors of one length, got {[tuple(v.shape) for v in vectors]}"
        )
    check_denominator(num_global_tokens)
    missing = trained & ~torch.isfinite(behaviour_logp)
    if missing.any():
        raise ContractError(
            f"{int(missing.sum())} of {int(trained.sum())} trained tokens have no behaviour "
            f"logprob, first at index {int(missing.nonzero()[0])}",
            hint="the engine must return one per sampled token",
        )


def check_denominator(num_global_tokens: int) -> None:
    """Raises ContractError: N < 1."""
    if num_global_tokens < 1:
        raise ContractError(
            f"num_global_tokens must be >= 1, got {num_global_tokens}: a step without trained "
            "tokens has no loss"
        )


def log_ratio(
    logp: Float[Tensor, " tokens"],
    behaviour_logp: Float[Tensor, " tokens"],
    trained: Bool[Tensor, " tokens"],
) -> Float[Tensor, " tokens"]:
    """log pi - log mu in nats, clamped to +-MAX_LOG_RATIO; 0 where untrained, with no gradient."""
    # Both sides are masked before the difference: NaN times a zero gradient would still be NaN.
    logp = torch.where(trained, logp, 0.0)
    return (logp - torch.where(trained, behaviour_logp, 0.0)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def ratio_stats(
    log_ratio: Float[Tensor, " tokens"],
    advantage: Float[Tensor, " tokens"],
    trained: Bool[Tensor, " tokens"],
) -> dict[str, Float[Tensor, ""]]:
    """Sums that describe how far the policy is from the behaviour.

    `num_tokens`, `positive_tokens` and `negative_tokens` (by sign of the advantage),
    `logprob_diff` (nats), `k3` (nats: r - 1 - log r, an estimate of KL(mu || pi) that is never
    negative), `ratio` and `ratio_sq`.
    """
    with torch.no_grad():
        x = log_ratio.detach()
        ratio = x.exp()
        # expm1 keeps the small values: r - 1 - log r would round to a negative number near r = 1.
        k3 = (torch.expm1(x) - x).clamp(min=0.0)
        return {
            "num_tokens": trained.sum().float(),
            "positive_tokens": (trained & (advantage > 0)).sum().float(),
            "negative_tokens": (trained & (advantage < 0)).sum().float(),
            "logprob_diff": masked_sum(x, trained),
            "k3": masked_sum(k3, trained),
            "ratio": masked_sum(ratio, trained),
            "ratio_sq": masked_sum(ratio * ratio, trained),
        }


def masked_sum(
    values: Float[Tensor, " tokens"], mask: Bool[Tensor, " tokens"]
) -> Float[Tensor, ""]:
    """Sum over the mask; NaN outside it does not matter."""
    return torch.where(mask, values, 0.0).sum()
