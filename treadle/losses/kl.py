r"""KL to a reference policy: three estimators from samples, in the loss or in the reward.

With x = log pi - log pi_ref at a token that pi sampled:

    k1 = x                       unbiased, may be negative
    k2 = x^2 / 2                 biased, its gradient is that of KL(pi || pi_ref)
    k3 = exp(-x) - 1 + x         unbiased, never negative; its gradient alone is not that of the KL
    k3+                          the value of k3 with the gradient of k2

Mind the sign: exp(x) - 1 - x is k3 of the reversed direction.

Guarantees: a value at an untrained position, NaN included, reaches neither value nor gradient;
everything is finite whatever the models say.

Takes: packed vectors of one micro-batch. Gives: KL per token, or advantages with a penalty.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from treadle.errors import ContractError
from treadle.losses.common import MAX_LOG_RATIO

Vector = Float[Tensor, " tokens"]
Mask = Bool[Tensor, " tokens"]

ESTIMATORS = ("k1", "k2", "k3", "k3+")

MAX_K3_NATS = 10.0
"""A token whose k3 is larger counts as this much, and has no gradient in a loss with k3."""


def kl_per_token(
    logp: Vector,
    ref_logp: Vector,
    trained: Mask,
    *,
    estimator: str,
    behaviour_logp: Vector | None = None,
) -> Vector:
    r"""An estimate of KL(pi || pi_ref) at each token in nats, with gradient; 0 where untrained.

    What its mean over tokens has as gradient, when the tokens were sampled by mu = `behaviour_logp`
    or, without it, by pi itself:

    | estimator | without mu | with mu |
    |---|---|---|
    | k1 | 0 on average: useless in a loss | exact |
    | k2, k3+ | exact | exact |
    | k3 | of another divergence | exact |

    With mu, each value is multiplied by r = exp(log pi - log mu). Its gradient is part of that of
    k1 and k3 (r k is an estimate under mu, whose gradient has both parts); for k2 and k3+ r is a
    constant, as their gradient is already that of the divergence.

    Args:
        logp: log pi(token), with gradient, at the sampling temperature.
        ref_logp: log pi_ref(token) at the same temperature.
        trained: True on tokens to learn.
        estimator: one of ESTIMATORS.
        behaviour_logp: log mu(token) as the sampler reported it.

    Raises:
        ContractError: a trained token has no reference logprob.

    Source: k1, k2, k3 are Schulman's; r k3 is DeepSeek-V3.2's. x is clamped to +-MAX_LOG_RATIO and
        k3 to MAX_K3_NATS.
    """
    x = _difference(logp, ref_logp, trained)
    k3 = (torch.expm1(-x) + x).clamp(min=0.0, max=MAX_K3_NATS)
    k2 = x.square() / 2
    if estimator == "k1":
        value = x
    elif estimator == "k2":
        value = k2
    elif estimator == "k3":
        value = k3
    elif estimator == "k3+":
        value = k2 + (k3 - k2).detach()
    else:
        raise ValueError(f"unknown estimator `{estimator}`, expected one of {ESTIMATORS}")
    if behaviour_logp is None:
        return value
    ratio = _difference(logp, behaviour_logp, trained).exp()
    return (ratio if estimator in ("k1", "k3") else ratio.detach()) * value


def kl_loss(
    logp: Vector,
    ref_logp: Vector,
    trained: Mask,
    *,
    estimator: str,
    beta: float,
    num_tokens: int,
    behaviour_logp: Vector | None = None,
) -> Float[Tensor, ""]:
    """beta times the mean of `kl_per_token`, as this micro-batch's share of the step's loss.

    Args:
        num_tokens: trained tokens that have a reference, over the whole step: the KL term has its
            own count, whatever the aggregation of the policy loss.

    Raises:
        ContractError: `num_tokens` < 1, or as `kl_per_token`.
    """
    if num_tokens < 1:
        raise ContractError(f"num_tokens must be >= 1, got {num_tokens}")
    values = kl_per_token(
        logp, ref_logp, trained, estimator=estimator, behaviour_logp=behaviour_logp
    )
    return beta * values.sum() / num_tokens


@torch.no_grad()
def kl_in_reward(
    advantage: Vector,
    logp: Vector,
    ref_logp: Vector,
    trained: Mask,
    sequence: Int[Tensor, " tokens"],
    *,
    beta: float,
    discount: float = 1.0,
) -> Vector:
    r"""Advantages whose rewards pay for distance: $A_t - \beta \sum_{s \ge t} \gamma^{s-t} k1_s$.

    The sum runs over the trained tokens of the row, this one included; what tools and prompts say
    costs nothing. Its policy gradient is unbiased for that of the sequence's KL (discount 1). No
    gradient flows through the penalty.

    Args:
        sequence: row of each token; tokens of a row are neighbours, in order.
        discount: gamma; 0 counts each token's own distance only.

    Raises:
        ContractError: a trained token has no reference logprob.
    """
    place = trained.nonzero()[:, 0]
    to_go = _difference(logp, ref_logp, trained)[place]
    row = sequence[place]
    # After k rounds, the sum over the next 2^k tokens of the row: the order of additions depends on
    # the row alone.
    shift, factor = 1, discount
    while shift < len(to_go) and factor:
        same = row[shift:] == row[:-shift]
        later = torch.where(same, factor * to_go[shift:], 0.0)
        to_go = torch.cat([to_go[:-shift] + later, to_go[-shift:]])
        shift, factor = 2 * shift, factor * factor
    penalty = torch.zeros_like(logp).index_put((place,), beta * to_go)
    return torch.where(trained, advantage, 0.0) - penalty


def _difference(logp: Vector, other: Vector, trained: Mask) -> Vector:
    """log pi - log other, clamped; 0 without gradient where untrained."""
    missing = trained & ~torch.isfinite(other)
    if missing.any():
        raise ContractError(
            f"{int(missing.sum())} of {int(trained.sum())} trained tokens have nothing to compare "
            f"with, first at index {int(missing.nonzero()[0])}: their logprob is "
            f"{float(other[missing][0])}",
            hint="every trained token needs the logprob of the reference policy and of the sampler",
        )
    x = torch.where(trained, logp, 0.0) - torch.where(trained, other, 0.0)
    return x.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
