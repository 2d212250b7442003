"""PPO's clipped surrogate on tokens, with an optional dual clip.

The gradient of a token vanishes once its ratio has left the interval in the direction of its
advantage, and only then.

Takes: Tokens. Gives: LossOutput.
"""

from __future__ import annotations

from treadle.losses.common import LossOutput, Tokens, log_ratio, output
from treadle.losses.kernels import clipped


def ppo_clip_loss(
    x: Tokens, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float = 0.0
) -> LossOutput:
    r"""Clipped importance-weighted policy gradient.

    $$l_t = -\min\big(\rho_t A_t,\ \mathrm{clip}(\rho_t, 1-\epsilon_l, 1+\epsilon_h) A_t\big),
      \qquad \rho_t = \exp(\log\pi_t - \log\mu_t)$$

    and with a dual clip $c$, where $A_t < 0$, at most $-c A_t$. Clipped tokens stay in the
    denominators.

    Args:
        clip_low, clip_high: trust-region epsilons, in ratio units (dimensionless). DAPO's
            clip-higher is clip_high = 0.28.
        dual_clip: c, in ratio units, above 1 + clip_high; 0 = off. 3 is usual.

    Source: PPO (arXiv:1707.06347), clipped surrogate; dual clip arXiv:1912.09729; DAPO
        (arXiv:2503.14476) for bounds that differ. Differs from all: the ratio is against what the
        sampler reported (a decoupled ratio is a correction), and the log-ratio is clamped to
        +-MAX_LOG_RATIO.
    """
    lr = log_ratio(x)
    loss, cut = clipped(lr.exp(), x.used_advantage, 1 - clip_low, 1 + clip_high, dual_clip)
    return output(x, loss, lr, clipped=cut, dropped=cut)
