"""DIS: tokens outside a window of ratios are left out, whatever direction they moved in.

Takes: Tokens. Gives: LossOutput.
"""

from __future__ import annotations

import torch

from treadle.losses.common import LossOutput, Tokens, log_ratio, output
from treadle.losses.kernels import detached


def dis_loss(
    x: Tokens,
    *,
    low_positive: float = 0.8,
    high_positive: float = 1.2,
    low_negative: float = 0.8,
    high_negative: float = 1.2,
) -> LossOutput:
    r"""$l_t = -\mathrm{sg}(w_t)\, A_t \log\pi_t$, $w_t = \rho_t$ within the window, else 0.

    The window is open and has its own two bounds for each sign of the advantage. Dropped tokens
    stay in the denominators.

    Args:
        low_positive, high_positive: of the ratio where A > 0 (dimensionless).
        low_negative, high_negative: where A < 0.

    Source: double-sided importance sampling of GLM-5 (its technical report), one window for both
        signs; MiMo-V2.6 (arXiv:2610.11959) has four bounds, 0.2 and 5.0, moved by the entropy.
    """
    lr = log_ratio(x)
    ratio = lr.detach().exp()
    up = x.used_advantage > 0
    low = torch.where(up, low_positive, low_negative)
    high = torch.where(up, high_positive, high_negative)
    dropped = (ratio <= low) | (ratio >= high)
    loss = detached(x, ratio * torch.where(dropped, 0.0, x.used_advantage))
    return output(x, loss, lr, clipped=dropped, dropped=dropped)
