"""PPO's clip with DeepSeek's sequence mask: bad rows that the policy has left are not pushed on.

A row with a negative advantage whose tokens have become unlikely teaches little but noise: pushing
it further down moves mass to wherever. Such a row is left out as a whole.

Takes: Tokens with whole rows. Gives: LossOutput.
"""

from __future__ import annotations

import torch

from treadle.losses.common import LossOutput, Tokens, log_ratio, output, row_mean
from treadle.losses.kernels import clipped


def sequence_mask_loss(
    x: Tokens,
    *,
    drop_above: float = 0.5,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = 0.0,
) -> LossOutput:
    r"""`ppo_clip_loss`, times 0 for the tokens with $A_t < 0$ of rows with
    $\frac{1}{n}\sum_t(\log\mu_t - \log\pi_t) > \delta$. They stay in the denominators.

    Args:
        drop_above: delta, nats per token.
        clip_low, clip_high, dual_clip: as in `ppo_clip_loss`.

    Source: DeepSeek-V3.2 (technical report), off-policy sequence masking; 0.5 is TRL's suggestion.
        Differs: the ratio and the mean are against what the sampler reported.
    """
    lr = log_ratio(x)
    loss, cut = clipped(lr.exp(), x.used_advantage, 1 - clip_low, 1 + clip_high, dual_clip)
    left = (x.used_advantage < 0) & (-row_mean(lr.detach(), x) > drop_above)
    return output(x, torch.where(left, 0.0, loss), lr, clipped=cut, dropped=cut | left)
