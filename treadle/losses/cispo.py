"""CISPO with a trust mask on probabilities: the default policy loss.

Every trained token keeps the plain policy gradient, weighted by its importance ratio; the weight is
capped and detached, so large ratios cannot explode and no token loses its gradient for having one.
What a cap cannot catch is caught by the mask: a token whose *probability* already moved by more
than a bound in the direction of its advantage is left out. Rare tokens (digits, "Wait") have large
ratios at tiny changes of probability, so ratio clips hit them most and this mask does not.

Takes: packed vectors of one micro-batch. Gives: LossOutput.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from treadle.losses.common import LossOutput, check_inputs, log_ratio, masked_sum, ratio_stats


def cispo_loss(
    logp: Float[Tensor, " tokens"],
    behaviour_logp: Float[Tensor, " tokens"],
    advantage: Float[Tensor, " tokens"],
    trained: Bool[Tensor, " tokens"],
    *,
    num_global_tokens: int,
    ratio_max: float = 5.0,
    drop_low: float = 0.2,
    drop_high: float = 0.2,
) -> LossOutput:
    r"""Capped, detached importance weight times policy gradient, averaged over trained tokens.

    $$L = -\frac{1}{N}\sum_t m_t k_t\, \mathrm{sg}(\min(\rho_t, \rho_{max}))\, A_t \log\pi_t,
      \qquad \rho_t = \exp(\log\pi_t - \log\mu_t)$$

    with $k_t = 0$ where $A_t > 0$ and $\pi_t - \mu_t > d_{high}$, or $A_t < 0$ and
    $\pi_t - \mu_t < -d_{low}$; else 1. On-policy the gradient of log pi_t is -A_t / N. Every token
    weighs 1 / N whatever the length of its row; dropped tokens stay in N.

    Args:
        logp: log pi(token), current weights, with gradient. Nats, <= 0.
        behaviour_logp: log mu(token) as the sampler reported it, at the sampling temperature.
            Nats. NaN is allowed where `trained` is False.
        advantage: A; finite where trained.
        trained: m. True on tokens to learn.
        num_global_tokens: N, the trained tokens of the whole step. A local count would make the
            gradient depend on the packing.
        ratio_max: cap of the weight (dimensionless).
        drop_low, drop_high: bounds of the mask, differences of probability in [0, 1].

    Returns:
        The loss, and the sums of `ratio_stats` plus `clipped_tokens` (ratio above the cap),
        `dropped_positive` and `dropped_negative` (masked, by sign of the advantage).

    Raises:
        ContractError: shapes differ, N < 1, or a trained token has no behaviour logprob.

    Source: CISPO (arXiv:2506.13585), without its lower bound; the mask is DPPO's total-variation
        mask (arXiv:2602.04879). Differs from both: mu is what the sampler reported, not a
        recomputation, and the log-ratio is clamped to +-MAX_LOG_RATIO.
    """
    check_inputs(logp, behaviour_logp, advantage, trained, num_global_tokens)
    lr = log_ratio(logp, behaviour_logp, trained)
    with torch.no_grad():
        ratio = lr.exp()
        moved = torch.where(trained, logp.exp() - behaviour_logp.exp(), 0.0)
        dropped_positive = trained & (advantage > 0) & (moved > drop_high)
        dropped_negative = trained & (advantage < 0) & (moved < -drop_low)
        kept = trained & ~dropped_positive & ~dropped_negative
        weight = ratio.clamp(max=ratio_max) * torch.where(kept, advantage, 0.0)
        stats = ratio_stats(lr, advantage, trained) | {
            "clipped_tokens": masked_sum((ratio > ratio_max).float(), trained),
            "dropped_positive": dropped_positive.sum().float(),
            "dropped_negative": dropped_negative.sum().float(),
        }
    loss = -(weight * torch.where(kept, logp, 0.0)).sum() / num_global_tokens
    return LossOutput(loss=loss, stats=stats)
