"""CISPO with a trust mask on probabilities: the default policy loss.

Every trained token keeps the plain policy gradient, weighted by its importance ratio; the weight is
capped and detached, so large ratios cannot explode and no token loses its gradient for having one.
What a cap cannot catch is caught by the mask: a token whose *probability* already moved by more
than a bound in the direction of its advantage is left out. Rare tokens (digits, "Wait") have large
ratios at tiny changes of probability, so ratio clips hit them most and this mask does not.

Takes: Tokens. Gives: LossOutput.
"""

from __future__ import annotations

import torch

from treadle.losses.common import LossOutput, Tokens, log_ratio, output
from treadle.losses.kernels import detached, outside_tv


def cispo_loss(
    x: Tokens,
    *,
    ratio_max: float = 5.0,
    ratio_min: float = 0.0,
    drop_low: float = 0.2,
    drop_high: float = 0.2,
) -> LossOutput:
    r"""Capped, detached importance weight times policy gradient.

    $$l_t = -k_t\, \mathrm{sg}(\mathrm{clip}(\rho_t, \rho_{min}, \rho_{max}))\, A_t \log\pi_t,
      \qquad \rho_t = \exp(\log\pi_t - \log\mu_t)$$

    with $k_t = 0$ where $A_t > 0$ and $\pi_t - \mu_t > d_{high}$, or $A_t < 0$ and
    $\pi_t - \mu_t < -d_{low}$; else 1. Dropped tokens stay in the denominators.

    Args:
        ratio_max, ratio_min: bounds of the weight (dimensionless). Without a lower bound (0) no
            token is ever weighted more than its ratio.
        drop_low, drop_high: bounds of the mask, differences of probability; 1 switches it off.

    Source: CISPO (arXiv:2506.13585), whose canonical form has no lower bound; the mask is DPPO's
        total-variation mask (arXiv:2602.04879). Differs from both: mu is what the sampler reported,
        not a recomputation, and the log-ratio is clamped to +-MAX_LOG_RATIO.
    """
    lr = log_ratio(x)
    ratio = lr.detach().exp()
    dropped = outside_tv(x, drop_low, drop_high)
    capped = ratio.clamp(ratio_min, ratio_max)
    loss = detached(x, capped * torch.where(dropped, 0.0, x.used_advantage))
    return output(x, loss, lr, clipped=capped != ratio, dropped=dropped)
