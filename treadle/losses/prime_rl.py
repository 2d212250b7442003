"""The default loss of prime-rl (August 2026): a probability mask and a small square.

Takes: Tokens. Gives: LossOutput.
"""

from __future__ import annotations

from treadle.losses.common import LossOutput, Tokens, log_ratio, output
from treadle.losses.kernels import leashed, outside_tv


def prime_rl_loss(
    x: Tokens, *, drop_low: float = 0.2, drop_high: float = 0.2, tau: float = 1e-3
) -> LossOutput:
    r"""$l_t = -k_t\,\rho_t A_t + \tau(\log\rho_t)^2$ with the mask of DPPO-TV; the gradient flows
    through the ratio, and the square also holds dropped tokens.

    Args:
        drop_low, drop_high: bounds of the mask, differences of probability in [0, 1].
        tau: strength of the pull towards mu, in reward units per square nat.

    Source: PrimeIntellect-ai/prime-rl, default loss; the mask is DPPO's (arXiv:2602.04879).
    """
    lr = log_ratio(x)
    dropped = outside_tv(x, drop_low, drop_high)
    loss = leashed(lr, x.used_advantage, ~dropped, tau)
    return output(x, loss, lr, clipped=dropped, dropped=dropped)
