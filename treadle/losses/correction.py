"""Corrections of what sampler and trainer disagree on, applied before a loss.

A token has three probabilities: mu, which the sampler reported; prox, the proximal policy's, by the
trainer with the weights that sampled; and pi, with the current weights. Their ratios are two
separate factors:

    rho = prox / mu       mismatch: other kernels, rounding, routing, truncation; same weights
    r   = pi / prox       staleness: the weights have moved since
    pi / mu = rho r       what a loss takes when nothing is corrected ("bypass")

A correction acts on rho, so that a loss can keep r in its trust region without confusing the two:
it weighs tokens by rho, drops tokens, or rejects whole rows. Dropped tokens stay in the
denominators of the step; rejected rows leave them, and so are found before the step is weighed.

Where prox was not measured in every group (learn.mismatch_share below 1), the current weights of
the step stand in for it: rho then holds the staleness too and r is 1. Their product is right in
both cases. Nothing here says what rho is when it was not measured: the statistics of mismatch are
over measured tokens alone (train/mismatch.py).

Guarantees: no gradient flows through rho; untrained positions are not looked at.

Takes: Tokens. Gives: Tokens with other weights, or the tokens of rejected rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, TypeVar

import torch

from treadle.losses.common import (
    MAX_LOG_RATIO,
    LossOutput,
    Tokens,
    log_ratio,
    masked_sum,
    row_mean,
    row_sum,
)
from treadle.losses.kernels import Mask, Vector

T = TypeVar("T", bound=Tokens)


@torch.no_grad()
def proximal(x: Tokens) -> Vector:
    """log prox in nats: as measured, and by the current weights where it was not."""
    logp = x.logp.detach()
    return logp if x.prox_logp is None else torch.where(x.prox_logp.isfinite(), x.prox_logp, logp)


@torch.no_grad()
def log_rho(x: Tokens) -> Vector:
    """log prox - log mu in nats, clamped to +-MAX_LOG_RATIO; 0 where untrained."""
    return log_ratio(replace(x, logp=proximal(x)))


@torch.no_grad()
def token_weight(log_rho: Vector, weight_max: float) -> Vector:
    """TIS: min(rho, weight_max) per token. Biased, with a variance that does not grow with length.

    Source: truncated importance sampling for engine mismatch (Yao et al. 2025); 2 is usual, 1.5
    to 5 in use.
    """
    return log_rho.exp().clamp(max=weight_max)


@torch.no_grad()
def row_weight(log_rho: Vector, x: Tokens, weight_max: float) -> Vector:
    """Sequence TIS: the product of rho over the row, at most weight_max, at each of its tokens.

    Unbiased but for the cap, and never without one: 1.1^100 is 13,780. 5 is usual, 2 to 10 in use.
    """
    total = row_sum(log_rho, x).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return total.exp().clamp(max=weight_max)


@torch.no_grad()
def outside(log_rho: Vector, low: float, high: float) -> Mask:
    """Tokens with rho outside [low, high]: MIS drops them; IcePop drops them and weighs the rest.

    Source: masked importance sampling; IcePop (Ring-1T technical report), [0.5, 2].
    """
    rho = log_rho.exp()
    # A ratio is exp of a difference of float32: let the bounds themselves pass.
    return (rho < low * (1 - 1e-6)) | (rho > high * (1 + 1e-6))


@torch.no_grad()
def rejected(
    x: Tokens,
    *,
    mean_low: float = 0.0,
    mean_high: float = 0.0,
    k3_max: float = 0.0,
    veto_low: float = 0.0,
    veto_high: float = 0.0,
) -> Mask:
    """Tokens of rows that are to leave the step as a whole. 0 switches a bound off.

    Args:
        mean_low, mean_high: of the geometric mean of rho over the row; .99 and 1.01, and .999 and
            1.001 for long outputs, are usual.
        k3_max: of the row's mean rho - 1 - log rho, nats; 1e-3 to 1e-2 are usual.
        veto_low, veto_high: of rho at any one token of the row; a veto_low of 1e-4 is usual.
    """
    lr = log_rho(x)
    mean, out = row_mean(lr, x).exp(), torch.zeros_like(x.trained)
    if mean_low > 0:
        out |= mean < mean_low
    if mean_high > 0:
        out |= mean > mean_high
    if k3_max > 0:
        out |= row_mean((torch.expm1(lr) - lr).clamp(min=0.0), x) > k3_max
    high = veto_high if veto_high > 0 else float("inf")
    vetoed = x.trained & ((lr.exp() < veto_low) | (lr.exp() > high))
    out |= row_sum(vetoed.to(lr.dtype), x) > 0
    return out & x.trained


def corrected(
    x: T,
    *,
    weight: Literal["none", "token", "sequence"] = "none",
    weight_max: float = 2.0,
    keep_low: float = 0.0,
    keep_high: float = 0.0,
) -> tuple[T, LossOutput]:
    """Tokens as the loss is to see them, and sums that describe the correction.

    Args:
        weight: multiply the weight of a token by rho, its own ("token") or its row's
            ("sequence"). The loss then takes its ratio against prox: pi / mu would count rho
            twice.
        weight_max: cap of that weight (dimensionless).
        keep_low, keep_high: tokens whose rho lies outside weigh 0; 0 switches a bound off.

    Returns:
        The tokens, and a LossOutput of loss 0 with the sums `corrected_tokens`, `correction`,
        `correction_sq` (of the factors), `masked_positive` and `masked_negative` (dropped here, by
        the sign of the advantage).
    """
    lr = log_rho(x)
    factor = torch.ones_like(lr)
    if weight == "token":
        factor = token_weight(lr, weight_max)
    elif weight == "sequence":
        factor = row_weight(lr, x, weight_max)
    high = keep_high if keep_high > 0 else float("inf")
    dropped = x.trained & outside(lr, keep_low, high)
    factor = torch.where(dropped, 0.0, factor)
    behaviour = x.behaviour_logp if weight == "none" else proximal(x)
    stats = {
        "corrected_tokens": x.trained.sum().float(),
        "correction": masked_sum(factor, x.trained),
        "correction_sq": masked_sum(factor * factor, x.trained),
        "masked_positive": (dropped & (x.advantage > 0)).sum().float(),
        "masked_negative": (dropped & (x.advantage < 0)).sum().float(),
    }
    weights = torch.where(x.trained, x.weight, 0.0) * factor
    out = replace(x, weight=weights, behaviour_logp=behaviour)
    return out, LossOutput(loss=x.logp.new_zeros(()), stats=stats)
