"""PPO's clipped value loss: what a critic minimises.

Guarantees: a value at an untrained position, NaN included, reaches neither loss, gradient nor
statistic; the loss is sum(weight x loss of a token), so micro-batches and ranks add up; before its
first update of a step, where V = V_old, it is the plain squared error.

Takes: packed vectors of one micro-batch. Gives: LossOutput.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from treadle.errors import ContractError
from treadle.losses.common import LossOutput, masked_sum


def value_loss(
    value: Float[Tensor, " tokens"],
    old_value: Float[Tensor, " tokens"],
    returns: Float[Tensor, " tokens"],
    trained: Bool[Tensor, " tokens"],
    weight: Float[Tensor, " tokens"],
    *,
    clip: float = 0.2,
) -> LossOutput:
    r"""Squared error of a critic whose value may move by `clip` per step.

    $$l_t = \tfrac12 \max\big((V_t - G_t)^2,
      \ (V^{old}_t + \mathrm{clip}(V_t - V^{old}_t, -c, c) - G_t)^2\big)$$

    The gradient of a token vanishes once its value has moved further than c towards its return; one
    that moved away from it is pulled back.

    Args:
        value: V by the current weights, in reward units, with gradient.
        old_value: V before the step, which the returns were made with.
        returns: G, the targets (`advantage.gae`).
        trained: True on tokens to learn.
        weight: as in `Tokens`: its denominators are those of the whole step.
        clip: c, in reward units; 0 = off.

    Returns:
        The loss, and sums over trained tokens: `value_tokens`, and `value_clipped_tokens`, whose
        gradient the clip cuts.

    Raises:
        ContractError: a trained token has no old value or no return.

    Source: the value loss of PPO implementations (OpenAI baselines, TRL, verl), half of the square
        as in verl.
    """
    for name, given in (("value before the step", old_value), ("return", returns)):
        missing = trained & ~torch.isfinite(given)
        if missing.any():
            raise ContractError(
                f"{int(missing.sum())} of {int(trained.sum())} trained tokens have no finite "
                f"{name}, first at index {int(missing.nonzero()[0])}"
            )
    v, old, goal = (torch.where(trained, x, 0.0) for x in (value, old_value, returns))
    moved, plain = v - old, (v - goal).square()
    held = (old + moved.clamp(-clip, clip) - goal).square()
    # Inside of the bounds both are one square, up to rounding: that must not count as clipped.
    cut = trained & (clip > 0) & (moved.abs() > clip) & (held > plain)
    per_token = 0.5 * torch.where(cut, held, plain)
    return LossOutput(
        loss=(torch.where(trained, weight, 0.0) * torch.where(trained, per_token, 0.0)).sum(),
        stats={
            "value_tokens": trained.sum().float(),
            "value_clipped_tokens": masked_sum(cut.float(), trained),
        },
    )
