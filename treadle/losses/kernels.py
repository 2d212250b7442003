"""The few shapes that policy losses are made of, per token; a loss is a ratio, a mask and a shape.

    clipped     -min(r A, clip(r) A)         gradient through r, cut at the bounds
    detached    -sg(c) log pi                the gradient of log pi, weighted by a constant
    leashed     -k r A + tau (log r)^2       gradient through r, pulled back by a square

On-policy, where r = 1 and nothing is cut, each has the gradient -A of log pi.

Takes: vectors that are finite also where untrained. Gives: losses per token, and masks.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from treadle.losses.common import Tokens

Vector = Float[Tensor, " tokens"]
Mask = Bool[Tensor, " tokens"]

ALMOST = 1e-6
"""How near to 0 and 1 a probability may come inside a logarithm."""


def clipped(
    ratio: Vector, advantage: Vector, low: float, high: float, dual: float = 0.0
) -> tuple[Vector, Mask]:
    """Loss -min(r A, clip(r, low, high) A), and the tokens whose gradient is cut.

    With `dual` > 0 the loss of a token with A < 0 is at most -dual x A: a large ratio cannot push
    a token down without limit.
    """
    free = ratio * advantage
    kept = torch.minimum(free, ratio.clamp(low, high) * advantage)
    if dual > 0:
        kept = torch.where(advantage < 0, torch.maximum(kept, dual * advantage), kept)
    return -kept, (kept != free).detach()


def detached(x: Tokens, factor: Vector) -> Vector:
    """Loss -sg(factor) log pi; a factor of 0 takes the token out, whatever its logprob is."""
    factor = factor.detach()
    return -factor * torch.where(x.trained & (factor != 0), x.logp, 0.0)


def leashed(log_ratio: Vector, advantage: Vector, kept: Mask, tau: float) -> Vector:
    """Loss -kept r A + tau (log r)^2; the square also holds the tokens that are not kept."""
    return -torch.where(kept, log_ratio.exp() * advantage, 0.0) + tau * log_ratio.square()


def moved_away(x: Tokens, log_ratio: Vector) -> Mask:
    """Tokens that have already moved in the direction of their advantage."""
    return ((x.advantage > 0) & (log_ratio > 0)) | ((x.advantage < 0) & (log_ratio < 0))


@torch.no_grad()
def outside_tv(x: Tokens, low: float, high: float) -> Mask:
    """Tokens whose probability rose by more than `high` with A > 0, or fell by more than `low` with
    A < 0. Differences of probability in [0, 1]: 1 and more lets every token pass."""
    moved = torch.where(x.trained, x.logp.exp() - x.behaviour_logp.exp(), 0.0)
    return ((x.advantage > 0) & (moved > high)) | ((x.advantage < 0) & (moved < -low))


@torch.no_grad()
def binary_kl(x: Tokens) -> Vector:
    """KL in nats between "this token or not" under mu and under pi; 0 where untrained."""
    mu = torch.where(x.trained, x.behaviour_logp, 0.0).exp().clamp(ALMOST, 1 - ALMOST)
    pi = torch.where(x.trained, x.logp, 0.0).exp().clamp(ALMOST, 1 - ALMOST)
    return mu * (mu / pi).log() + (1 - mu) * ((1 - mu) / (1 - pi)).log()
