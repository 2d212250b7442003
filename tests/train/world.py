"""A step cut over ranks: every rank weighs the whole batch and computes its own rows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.train.conftest import ToyPolicy
from treadle.batch import AGGREGATIONS, pack, token_weights
from treadle.losses import POLICY_LOSSES
from treadle.train.forward import forward
from treadle.types import Sample


def rows() -> list[Sample]:
    """Rows of 1 to 5 tokens of two prompts; behaviour a little off, advantages of both signs."""
    generator = torch.Generator().manual_seed(3)
    out = []
    for i in range(7):
        n = 1 + (2 * i) % 5
        ids = torch.randint(0, 12, (2 + n,), generator=generator).tolist()
        mu = (-2.0 + torch.randn(n, generator=generator) * 0.3).tolist()
        advantage = 1.0 if i % 3 else -0.7
        out.append(
            Sample(
                trajectory_id=f"{i % 2}/{i // 2 if i < 4 else i}",
                ordinal=i % 2,
                ids=tuple(ids),
                trained=(False,) * 2 + (True,) * n,
                logprobs=(math.nan,) * 2 + tuple(mu),
                versions=(-1,) * 2 + (0,) * n,
                advantages=(math.nan,) * 2 + (advantage,) * n,
                temperature=1.0,
            )
        )
    return out


def gradients(rank: int, world: int) -> dict[str, dict[str, Tensor]]:
    """This rank's share of the gradient, for every aggregation and some losses."""
    samples, found = rows(), {}
    for loss in ("cispo", "ppo_clip", "gspo"):
        for mode in AGGREGATIONS:
            policy = ToyPolicy()
            weights = token_weights(samples, mode, norm_tokens=8)
            mine = list(range(rank, len(samples), world))
            for micro in pack(
                [samples[i] for i in mine],
                micro_tokens=20,
                weights=[weights[i] for i in mine],
            ):
                options = {"clip_low": 0.9, "clip_high": 9.0} if loss == "gspo" else {}
                POLICY_LOSSES[loss](forward(policy, micro), **options).loss.backward()
            found[f"{loss}/{mode}"] = {
                name: p.grad if p.grad is not None else torch.zeros_like(p)
                for name, p in policy.parameters().items()
            }
    return found
