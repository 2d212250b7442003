"""What every policy loss shares: its input, its output, the safe log-ratio, sums over rows, and its
diagnostics.

Guarantees: a value at an untrained position, NaN included, reaches neither loss, gradient nor
statistic; ratios are finite whatever the sampler reported; a loss is sum(weight x loss of a token),
so micro-batches and ranks add up.

Takes: packed vectors of one micro-batch. Gives: LossOutput and the pieces to build one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from treadle.errors import ContractError

MAX_LOG_RATIO = 20.0
"""Nats. exp(20) is about 5e8: finite in float32, so one bad token cannot make the step inf."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """The packed tokens of one micro-batch, as every loss takes them: vectors of one length.

    Where `trained` is False every other vector may hold anything, NaN included.
    """

    logp: Float[Tensor, " tokens"]
    """log pi(token) by the current weights, with gradient. Nats, <= 0."""
    behaviour_logp: Float[Tensor, " tokens"]
    """log mu(token), what ratios are taken against: as the sampler reported it, at the sampling
    temperature; or the proximal policy's, where a correction put it there. Nats."""
    advantage: Float[Tensor, " tokens"]
    """A, in units of the reward or of the estimator; finite where trained."""
    trained: Bool[Tensor, " tokens"]
    """True on tokens to learn."""
    weight: Float[Tensor, " tokens"]
    """What the loss of the token is multiplied by; see batch/weights.py. Its denominators are those
    of the whole step: a local count would make the gradient depend on the packing."""
    sequence: Int[Tensor, " tokens"]
    """Row of the token, counted from 0; a row is whole in one micro-batch."""
    prox_logp: Float[Tensor, " tokens"] | None = None
    """The trainer's log-probability by the weights that sampled; NaN where not measured."""

    def __post_init__(self) -> None:
        vectors = (
            *(self.logp, self.behaviour_logp, self.advantage, self.trained),
            *(self.weight, self.sequence),
            *(() if self.prox_logp is None else (self.prox_logp,)),
        )
        if self.logp.ndim != 1 or any(v.shape != self.logp.shape for v in vectors):
            raise ContractError(
                f"expected vectors of one length, got {[tuple(v.shape) for v in vectors]}"
            )

    @property
    def used_advantage(self) -> Float[Tensor, " tokens"]:
        """A, and 0 where untrained."""
        return torch.where(self.trained, self.advantage, 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOutput:
    loss: Float[Tensor, ""]
    """This micro-batch's share of the step's loss: shares add up, over ranks too."""
    stats: dict[str, Float[Tensor, ""]]
    """Detached sums over the trained tokens of this micro-batch, never means: they add up, and
    the trainer divides once per step."""


def log_ratio(x: Tokens) -> Float[Tensor, " tokens"]:
    """log pi - log mu in nats, clamped to +-MAX_LOG_RATIO; 0 where untrained, with no gradient.

    Raises ContractError: a trained token has no behaviour logprob.
    """
    missing = x.trained & ~torch.isfinite(x.behaviour_logp)
    if missing.any():
        raise ContractError(
            f"{int(missing.sum())} of {int(x.trained.sum())} trained tokens have no behaviour "
            f"logprob, first at index {int(missing.nonzero()[0])}",
            hint="the engine must return one per sampled token",
        )
    # Both sides are masked before the difference: NaN times a zero gradient would still be NaN.
    logp = torch.where(x.trained, x.logp, 0.0)
    mu = torch.where(x.trained, x.behaviour_logp, 0.0)
    return (logp - mu).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def weighted_sum(per_token: Float[Tensor, " tokens"], x: Tokens) -> Float[Tensor, ""]:
    """sum(weight x loss of a token) over the trained tokens: the loss of the micro-batch."""
    return (torch.where(x.trained, x.weight, 0.0) * torch.where(x.trained, per_token, 0.0)).sum()


def row_sum(values: Float[Tensor, " tokens"], x: Tokens) -> Float[Tensor, " tokens"]:
    """At each token, the sum over the trained tokens of its row."""
    used = torch.where(x.trained, values, 0.0)
    # There are at most as many rows as tokens: no need to ask the device how many.
    return torch.zeros_like(used).index_add(0, x.sequence, used)[x.sequence]


def row_mean(values: Float[Tensor, " tokens"], x: Tokens) -> Float[Tensor, " tokens"]:
    """At each token, the mean over the trained tokens of its row."""
    return row_sum(values, x) / row_sum(x.trained.to(values.dtype), x).clamp(min=1.0)


def output(
    x: Tokens,
    per_token: Float[Tensor, " tokens"],
    log_ratio: Float[Tensor, " tokens"],
    *,
    clipped: Bool[Tensor, " tokens"] | None = None,
    dropped: Bool[Tensor, " tokens"] | None = None,
) -> LossOutput:
    """The loss from its per-token values, with the statistics that every policy loss reports.

    Args:
        per_token: finite also where untrained: computed from `log_ratio` and `used_advantage`.
        clipped: tokens whose weight is capped or whose gradient is cut (`clipped_tokens`).
        dropped: tokens that keep no gradient; they stay in the denominators (`dropped_positive`
            and `dropped_negative`, by the sign of the advantage).
    """
    nothing = torch.zeros_like(x.trained)
    clipped = nothing if clipped is None else clipped & x.trained
    dropped = nothing if dropped is None else dropped & x.trained
    stats = ratio_stats(log_ratio, x.advantage, x.trained) | {
        "clipped_tokens": clipped.sum().float(),
        "dropped_positive": (dropped & (x.advantage > 0)).sum().float(),
        "dropped_negative": (dropped & (x.advantage < 0)).sum().float(),
    }
    return LossOutput(loss=weighted_sum(per_token, x), stats=stats)


def ratio_stats(
    log_ratio: Float[Tensor, " tokens"],
    advantage: Float[Tensor, " tokens"],
    trained: Bool[Tensor, " tokens"],
) -> dict[str, Float[Tensor, ""]]:
    """Sums that describe how far the policy is from the behaviour.

    `num_tokens`, `positive_tokens` and `negative_tokens` (by sign of the advantage),
    `logprob_diff` (nats), `k3` (nats: r - 1 - log r, an estimate of KL(mu || pi) that is never
    negative), `ratio` and `ratio_sq`.
    """
    with torch.no_grad():
        x = log_ratio.detach()
        ratio = x.exp()
        # expm1 keeps the small values: r - 1 - log r would round to a negative number near r = 1.
        k3 = (torch.expm1(x) - x).clamp(min=0.0)
        return {
            "num_tokens": trained.sum().float(),
            "positive_tokens": (trained & (advantage > 0)).sum().float(),
            "negative_tokens": (trained & (advantage < 0)).sum().float(),
            "logprob_diff": masked_sum(x, trained),
            "k3": masked_sum(k3, trained),
            "ratio": masked_sum(ratio, trained),
            "ratio_sq": masked_sum(ratio * ratio, trained),
        }


def masked_sum(
    values: Float[Tensor, " tokens"], mask: Bool[Tensor, " tokens"]
) -> Float[Tensor, ""]:
    """Sum over the mask; NaN outside it does not matter."""
    return torch.where(mask, values, 0.0).sum()
