"""The plain policy gradient: no ratio, no clip, no mask.

Right on the samples of the very weights that are trained; on older ones it is biased, and nothing
here says so but the statistics of the ratio.

Takes: Tokens. Gives: LossOutput.
"""

from __future__ import annotations

from treadle.losses.common import LossOutput, Tokens, log_ratio, output
from treadle.losses.kernels import detached


def reinforce_loss(x: Tokens) -> LossOutput:
    r"""$l_t = -A_t \log\pi_t$.

    Source: REINFORCE (Williams 1992, Machine Learning 8); RLOO (arXiv:2402.14740) is this with its
        own baseline. mu is looked at for the statistics alone.
    """
    return output(x, detached(x, x.used_advantage), log_ratio(x).detach())
