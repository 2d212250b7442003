"""DPPO: a trust region on probabilities, as a mask; the gradient of what stays is not clipped.

A ratio bound is tight for rare tokens and loose for common ones. These bounds ask how far the
distribution of the token really moved, by its total variation or by its binary KL.

Takes: Tokens. Gives: LossOutput.
"""

from __future__ import annotations

import torch

from treadle.losses.common import LossOutput, Tokens, log_ratio, output
from treadle.losses.kernels import Mask, Vector, binary_kl, detached, moved_away, outside_tv


def dppo_tv_loss(
    x: Tokens, *, drop_low: float = 0.2, drop_high: float = 0.2, ratio_max: float = 20.0
) -> LossOutput:
    r"""$l_t = -k_t\,\mathrm{sg}(\min(\rho_t, \rho_{max}))\, A_t \log\pi_t$, masked by probability.

    $k_t = 0$ where $A_t > 0$ and $\pi_t - \mu_t > d_{high}$, or $A_t < 0$ and
    $\pi_t - \mu_t < -d_{low}$.

    Args:
        drop_low, drop_high: bounds, differences of probability in [0, 1].
        ratio_max: cap of the weight (dimensionless).

    Source: DPPO (arXiv:2602.04879), total variation. mu is what the sampler reported, as there.
    """
    lr = log_ratio(x)
    return _masked(x, lr, outside_tv(x, drop_low, drop_high), ratio_max)


def dppo_kl_loss(x: Tokens, *, kl_max: float = 0.05, ratio_max: float = 20.0) -> LossOutput:
    r"""The same with $k_t = 0$ where the token moved with its advantage and the KL between "this
    token or not" under mu and under pi, $\mu\log\frac{\mu}{\pi} + (1-\mu)\log\frac{1-\mu}{1-\pi}$,
    exceeds a bound.

    Args:
        kl_max: the bound, nats.
        ratio_max: cap of the weight (dimensionless).

    Source: DPPO (arXiv:2602.04879), binary KL.
    """
    lr = log_ratio(x)
    return _masked(x, lr, moved_away(x, lr) & (binary_kl(x) > kl_max), ratio_max)


def _masked(x: Tokens, lr: Vector, dropped: Mask, ratio_max: float) -> LossOutput:
    ratio = lr.detach().exp()
    factor = ratio.clamp(max=ratio_max) * torch.where(dropped, 0.0, x.used_advantage)
    return output(x, detached(x, factor), lr, clipped=ratio > ratio_max, dropped=dropped)
