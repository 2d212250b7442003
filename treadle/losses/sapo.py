"""SAPO: a smooth gate on the ratio in place of a clip.

Takes: Tokens. Gives: LossOutput.
"""

from __future__ import annotations

import torch

from treadle.losses.common import LossOutput, Tokens, log_ratio, output


def sapo_loss(x: Tokens, *, tau_positive: float = 1.0, tau_negative: float = 1.05) -> LossOutput:
    r"""$l_t = -f(\rho_t) A_t$ with $f(\rho) = \frac{4}{\tau}\,\sigma(\tau (\rho - 1))$.

    f has slope 1 at a ratio of 1, so the on-policy gradient is -A; its value there is 2 / tau, so
    only the gradient of this loss can be compared with others. The gradient fades on both sides.

    Args:
        tau_positive, tau_negative: how fast it fades, by the sign of A; a larger tau for A < 0
            fades sooner, as pushing a token down raises all others.

    Source: SAPO (arXiv:2511.20347). Differs: the ratio is against what the sampler reported.
    """
    lr = log_ratio(x)
    tau = torch.where(x.used_advantage > 0, tau_positive, tau_negative)
    gate = torch.sigmoid(tau * (lr.exp() - 1)) * 4 / tau
    return output(x, -gate * x.used_advantage, lr)
