"""Cross-entropy on demonstrated tokens: the loss of supervised fine-tuning.

Takes: Tokens, of which behaviour and advantage are not looked at. Gives: LossOutput.
"""

from __future__ import annotations

import torch

from treadle.losses.common import LossOutput, Tokens, masked_sum, weighted_sum


def cross_entropy_loss(x: Tokens) -> LossOutput:
    r"""Negative log-likelihood, $l_t = -\log\pi_t$, in nats.

    Returns:
        The loss, and the sums `ce_tokens` and `ce_nll` (nats) over the trained tokens.
    """
    logp = torch.where(x.trained, x.logp, 0.0)
    stats = {"ce_tokens": x.trained.sum().float(), "ce_nll": -masked_sum(logp.detach(), x.trained)}
    return LossOutput(loss=weighted_sum(-logp, x), stats=stats)
