"""PPO's clipped surrogate on tokens, against the behaviour policy.

The gradient of a token vanishes once its ratio has left the interval in the direction of its
advantage, and only then.

Takes: packed vectors of one micro-batch. Gives: LossOutput.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from treadle.losses.common import LossOutput, check_inputs, log_ratio, ratio_stats


def ppo_clip_loss(
    logp: Float[Tensor, " tokens"],
    behaviour_logp: Float[Tensor, " tokens"],
    advantage: Float[Tensor, " tokens"],
    trained: Bool[Tensor, " tokens"],
    *,
    num_global_tokens: int,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> LossOutput:
    r"""Clipped importance-weighted policy gradient, averaged over trained tokens.

    $$L = -\frac{1}{N}\sum_t m_t \min\big(\rho_t A_t,\
          \mathrm{clip}(\rho_t, 1-\epsilon_l, 1+\epsilon_h) A_t\big),
      \qquad \rho_t = \exp(\log\pi_t - \log\mu_t)$$

    Every token weighs 1 / N whatever the length of its row; clipped tokens stay in N.

    Args:
        logp: log pi(token), current weights, with gradient. Nats, <= 0.
        behaviour_logp: log mu(token) as the sampler reported it, at the sampling temperature.
            Nats. NaN is allowed where `trained` is False.
        advantage: A; finite where trained.
        trained: m. True on tokens to learn.
        num_global_tokens: N, the trained tokens of the whole step. A local count would make the
            gradient depend on the packing.
        clip_low, clip_high: trust-region epsilons, in ratio units (dimensionless).

    Returns:
        The loss, and the sums of `ratio_stats` plus `clipped_tokens` (gradient cut),
        `dropped_positive` and `dropped_negative` (the same by sign of the advantage).

    Raises:
        ContractError: shapes differ, N < 1, or a trained token has no behaviour logprob.

    Source: PPO (arXiv:1707.06347), clipped surrogate; DAPO (arXiv:2503.14476) for the token-level
        mean and for bounds that may differ. Differs from both: the ratio is against what the
        sampler reported, and the log-ratio is clamped to +-MAX_LOG_RATIO.
    """
    check_inputs(logp, behaviour_logp, advantage, trained, num_global_tokens)
    lr = log_ratio(logp, behaviour_logp, trained)
    ratio = lr.exp()
    used = torch.where(trained, advantage, 0.0)
    free = ratio * used
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high) * used
    loss = -torch.minimum(free, bounded).sum() / num_global_tokens
    with torch.no_grad():
        cut = trained & (bounded < free)
        stats = ratio_stats(lr, advantage, trained) | {
            "clipped_tokens": cut.sum().float(),
            "dropped_positive": (cut & (advantage > 0)).sum().float(),
            "dropped_negative": (cut & (advantage < 0)).sum().float(),
        }
    return LossOutput(loss=loss, stats=stats)
