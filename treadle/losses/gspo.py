"""GSPO: one importance ratio per row, the geometric mean of its tokens' ratios.

The clip then takes a whole row out, or none of it; ratios of rows vary far less than ratios of
tokens, so its bounds are a thousand times tighter than PPO's.

Takes: Tokens with whole rows. Gives: LossOutput.
"""

from __future__ import annotations

from treadle.losses.common import LossOutput, Tokens, log_ratio, output, row_mean
from treadle.losses.kernels import clipped

MAX_LOG_SEQUENCE_RATIO = 10.0
"""Nats: a row's mean log-ratio beyond this is cut before exp."""


def gspo_loss(x: Tokens, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> LossOutput:
    r"""PPO's clipped surrogate with the sequence ratio, in its token form.

    $$l_t = -\min\big(s_t A_t,\ \mathrm{clip}(s_t, 1-\epsilon_l, 1+\epsilon_h) A_t\big),\qquad
      s_t = \mathrm{sg}(s)\,\frac{\pi_t}{\mathrm{sg}(\pi_t)},\qquad
      s = \exp\Big(\frac{1}{n}\sum_t (\log\pi_t - \log\mu_t)\Big)$$

    over the n trained tokens of the row. With one advantage per row this is GSPO; with advantages
    by token it is GSPO-token. Meant for `seq_mean_token_mean`.

    Args:
        clip_low, clip_high: bounds of s around 1 (dimensionless).

    Source: GSPO (arXiv:2507.18071). Differs: mu is what the sampler reported. A row is one branch
        of a rollout. LUSPO is this with `seq_mean_token_sum` and bounds of 2e-3 and 2.5e-3.
    """
    lr = log_ratio(x)
    mean = row_mean(lr.detach(), x)
    # The zero is taken first: the other order would round the small mean away.
    log_s = ((lr - lr.detach()) + mean).clamp(max=MAX_LOG_SEQUENCE_RATIO)
    loss, cut = clipped(log_s.exp(), x.used_advantage, 1 - clip_low, 1 + clip_high)
    return output(x, loss, lr, clipped=cut, dropped=cut)
