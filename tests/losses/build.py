"""Tokens from plain lists, and the gradient of a loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from treadle.losses import LossOutput, Tokens


def tokens(
    logp: Sequence[float] | Tensor,
    behaviour: Sequence[float],
    advantage: Sequence[float],
    trained: Sequence[bool] | None = None,
    *,
    weight: float | Sequence[float] | None = None,
    rows: Sequence[int] | None = None,
    prox: Sequence[float] | None = None,
) -> Tokens:
    """Unless told otherwise: all trained, each a row of its own, weights 1 / (trained tokens)."""
    n = len(logp)
    mask = torch.tensor([True] * n if trained is None else list(trained), dtype=torch.bool)
    if weight is None:
        weight = 1 / max(int(mask.sum()), 1)
    weights = [weight] * n if isinstance(weight, float) else list(weight)
    return Tokens(
        logp=logp if isinstance(logp, Tensor) else torch.tensor(logp),
        behaviour_logp=torch.tensor(behaviour),
        advantage=torch.tensor(advantage),
        trained=mask,
        weight=torch.tensor(weights),
        sequence=torch.tensor(range(n) if rows is None else rows, dtype=torch.int64),
        prox_logp=None if prox is None else torch.tensor(prox),
    )


def run(
    loss: Callable[..., LossOutput],
    logp: Sequence[float],
    behaviour: Sequence[float],
    advantage: Sequence[float],
    trained: Sequence[bool] | None = None,
    *,
    weight: float | Sequence[float] | None = None,
    rows: Sequence[int] | None = None,
    **options: float,
) -> tuple[LossOutput, Tensor]:
    """The loss and its gradient with respect to logp."""
    x = torch.tensor(logp, requires_grad=True)
    out = loss(tokens(x, behaviour, advantage, trained, weight=weight, rows=rows), **options)
    out.loss.backward()
    assert x.grad is not None
    return out, x.grad
