"""REPO: advantages that stop rewarding a token for having been likely already.

A policy gradient loses entropy at a rate of minus the covariance of log pi and pi A: reinforcing
what is likely sharpens, reinforcing what is rare spreads. Both variants subtract a multiple of
the (centred) log-probability from the advantage; they differ in the multiple.

Guarantees: nothing depends on how tokens are packed; a value at an untrained position, NaN
included, is not read and becomes 0; no gradient flows.

Takes: packed vectors of one micro-batch. Gives: the advantages to train with.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

MIN_LOGP_NATS = -20.0
"""A rarer token counts as this rare: one stray token cannot outweigh a step."""


@torch.no_grad()
def repo_r(
    advantage: Float[Tensor, " tokens"],
    logp: Float[Tensor, " tokens"],
    trained: Bool[Tensor, " tokens"],
    *,
    zeta: float,
) -> Float[Tensor, " tokens"]:
    r"""REPO-R: the multiple is $\zeta |A|$, so the advantage is rescaled and never changes sign.

    $$A' = A \max(0, 1 - \mathrm{sign}(A)\,\zeta\,\max(\log\pi, -20))$$

    With zeta > 0 rare good tokens get more credit and rare bad tokens less blame: entropy rises.
    With zeta < 0 the reverse. Where A = 0 it has no authority.

    Args:
        advantage: A; NaN is allowed where `trained` is False.
        logp: log pi(token), current weights, nats; its gradient is not used.
        trained: True on tokens to learn.
        zeta: per nat; the controller of `controllers.next_zeta` moves it.

    Source: REPO (arXiv:2603.11682), REPO-R.
    """
    a = torch.where(trained, advantage, 0.0)
    lp = torch.where(trained, logp, 0.0).clamp(min=MIN_LOGP_NATS)
    return a * (1.0 - a.sign() * zeta * lp).clamp(min=0.0)


@torch.no_grad()
def repo_d(
    advantage: Float[Tensor, " tokens"],
    logp: Float[Tensor, " tokens"],
    entropy: Float[Tensor, " tokens"],
    trained: Bool[Tensor, " tokens"],
    *,
    beta: float,
) -> Float[Tensor, " tokens"]:
    r"""REPO-D: $A' = A - \beta (\log\pi + H)$, one multiple for all tokens.

    log pi + H is log pi minus its mean under the policy (-H), so the term has mean 0 and is a
    baseline's worth of change on-policy; it acts where A = 0 too, and may change a sign.

    Args:
        entropy: H of the distribution that the token was drawn from, nats.
        beta: in units of the advantage per nat.

    Source: REPO (arXiv:2603.11682), REPO-D.
    """
    lp = torch.where(trained, logp, 0.0).clamp(min=MIN_LOGP_NATS)
    centred = lp + torch.where(trained, entropy, 0.0)
    return torch.where(trained, advantage - beta * centred, 0.0)
