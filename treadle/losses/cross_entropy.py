"""Cross-entropy on demonstrated tokens: the loss of supervised fine-tuning.

Takes: packed log-probabilities of one micro-batch. Gives: LossOutput.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from treadle.errors import ContractError
from treadle.losses.common import LossOutput, check_denominator, masked_sum


def cross_entropy_loss(
    logp: Float[Tensor, " tokens"],
    trained: Bool[Tensor, " tokens"],
    *,
    num_global_tokens: int,
) -> LossOutput:
    r"""Mean negative log-likelihood, $L = -\frac{1}{N}\sum_t m_t \log\pi_t$, in nats per token.

    Args:
        logp: log pi(token), with gradient. Nats, <= 0. NaN is allowed where untrained.
        trained: m. True on tokens to learn.
        num_global_tokens: N, the trained tokens of the whole step.

    Returns:
        The loss, and the sums `num_tokens` and `nll` (nats).

    Raises:
        ContractError: shapes differ or N < 1.
    """
    if logp.ndim != 1 or logp.shape != trained.shape:
        raise ContractError(
            f"expected two vectors of one length, got {tuple(logp.shape)}, {tuple(trained.shape)}"
        )
    check_denominator(num_global_tokens)
    total = -torch.where(trained, logp, 0.0).sum()
    stats = {"num_tokens": trained.sum().float(), "nll": -masked_sum(logp.detach(), trained)}
    return LossOutput(loss=total / num_global_tokens, stats=stats)
