"""Policy mirror descent as in Kimi's models: a square holds the policy near the one that sampled.

Takes: Tokens, whole rows for the sequence form. Gives: LossOutput.
"""

from __future__ import annotations

from treadle.losses.common import LossOutput, Tokens, log_ratio, output, row_mean, row_sum
from treadle.losses.kernels import leashed


def kimi_sequence_loss(x: Tokens, *, tau: float = 0.01) -> LossOutput:
    r"""$\frac{\tau}{2}\big(\frac{A}{\tau} - \sum_t\log\frac{\pi_t}{\mu_t}\big)^2$ per row.

    The gradient of each log pi_t is -(A - tau sum log ratio): all tokens of a row get the same. The
    row's loss is spread over its tokens, so `seq_mean_token_sum` gives the mean over rollouts.

    Args:
        tau: strength of the pull towards mu, in reward units per nat.

    Source: Kimi K1.5 (arXiv:2501.12599), equation of the policy update; K2 the same. A is the
        reward minus the group's mean; where advantages differ within a row, their mean is taken.
    """
    lr = log_ratio(x)
    error = row_mean(x.used_advantage, x) / tau - row_sum(lr, x)
    num_tokens = row_sum(x.trained.to(lr.dtype), x).clamp(min=1.0)
    return output(x, 0.5 * tau * error.square() / num_tokens, lr)


def kimi_token_loss(
    x: Tokens, *, log_low: float = -1.0, log_high: float = 1.0, tau: float = 0.01
) -> LossOutput:
    r"""$l_t = -k_t\,\rho_t A_t + \tau(\log\rho_t)^2$, $k_t = 1$ where
    $\log\rho_t$ lies in $[\alpha, \beta]$, whatever the sign of A.

    Args:
        log_low, log_high: alpha and beta, nats; the paper gives no numbers, these are ours.
        tau: strength of the pull towards mu, in reward units per square nat; K1.5's number.

    Source: Kimi K2.5 (arXiv:2602.02276), token-level clipping with a quadratic penalty; divided by
        the trained tokens of the batch, as `token_mean`.
    """
    lr = log_ratio(x)
    kept = (lr.detach() >= log_low) & (lr.detach() <= log_high)
    loss = leashed(lr, x.used_advantage, kept, tau)
    return output(x, loss, lr, clipped=~kept, dropped=~kept)
