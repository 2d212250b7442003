"""Parity: do trainer and sampler agree on the log-probabilities of what was sampled?

Before anything is learnt, the trainer scores the sampled tokens with the very weights that
sampled them. A difference is then a bug: stale weights, another temperature, a wrong template or
mask, a kernel that differs. The guard stops the run while nothing is spoilt.

Takes: log-probabilities of both sides. Gives: Parity, or ContractError with the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from treadle.batch import pack
from treadle.config import LearnConfig
from treadle.errors import ContractError
from treadle.train.forward import TrainablePolicy, forward
from treadle.train.metrics import Scored
from treadle.types import Sample

BOUNDS = {torch.float32: 1e-3, torch.bfloat16: 4e-2}
"""Mean |difference| in nats that stops a run. float32 gives about 1e-5. In bfloat16 the two paths
add in another order, so after some layers they round independently: 30 layers give 0.02 where
the model is unsure (SmolLM2-135M, untrained, temperature 1) and less as it gets sure. That bound
is for gross faults: a wrong temperature, template or model. Weights one update stale give about
0.05 and are not left to it: every publication is proven by the fingerprint of the weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parity:
    mean_abs: float
    """Mean |trainer - sampler logprob|, nats."""
    max_abs: float
    """Largest of them, nats; in bfloat16 single tokens reach 0.1 to 0.4 by rounding alone."""
    num_tokens: int
    dtype: torch.dtype
    """Of the trainer's computation."""
    worst: str
    """Where the largest difference is, and both values."""


def parity(
    policy: TrainablePolicy, samples: Sequence[Sample], *, micro_tokens: int = 4096
) -> Parity:
    """Score the samples with the current weights and compare; forward only.

    Each token is scored at the temperature it was sampled at (`Sample.temperature`).
    `Trainer.step(guard=True)` gives the same from the forward that it does anyway.

    Args:
        samples: sampled by the policy's current weights.
        micro_tokens: packed tokens per forward.

    Raises:
        ContractError: there is no token to compare.
    """
    micros = pack(samples, micro_tokens=micro_tokens)
    with torch.no_grad():
        scored = [(m, forward(policy, m).logp.float().cpu().numpy()) for m in micros]
    return compare(scored, samples, dtype=policy.dtype)


def compare(
    scored: Sequence[Scored],
    samples: Sequence[Sample],
    *,
    dtype: torch.dtype,
    version: int | None = None,
) -> Parity:
    """Parity from log-probabilities at hand.

    Args:
        scored: micro-batches with the trainer's log-probabilities [n] of their targets.
        samples: what the micro-batches were packed from.
        dtype: of the trainer's computation.
        version: compare only tokens sampled by this policy version; None = all.

    Raises:
        ContractError: there is no token to compare.
    """
    total, count, worst, where = 0.0, 0, -1.0, ""
    for micro, logp in scored:
        chosen = np.flatnonzero(
            micro.version == version if version is not None else micro.version >= 0
        )
        if not len(chosen):
            continue
        difference = np.abs(logp[chosen] - micro.behaviour[chosen]).astype(np.float64)
        total += float(difference.sum())
        count += len(chosen)
        # A NaN is the worst of all, and argmax finds it first.
        at = int(difference.argmax())
        if not difference[at] <= worst and not math.isnan(worst):
            worst, token = float(difference[at]), int(chosen[at])
            sample = samples[int(micro.row[token])]
            where = (
                f"trajectory {sample.trajectory_id}, token {int(micro.position[token])} of "
                f"{len(sample.ids)} (id {int(micro.targets[token])}): trainer "
                f"{float(logp[token]):.4f}, sampler {float(micro.behaviour[token]):.4f}"
            )
    if count == 0:
        which = f"sampled by version {version}" if version is not None else "that was sampled"
        raise ContractError(f"parity of trainer and sampler: no trained token {which} to compare")
    return Parity(mean_abs=total / count, max_abs=worst, num_tokens=count, dtype=dtype, worst=where)


def guard(parity: Parity, learn: LearnConfig) -> None:
    """Stop the run when trainer and sampler differ by more than `learn.parity_stop` on average.

    Raises:
        ContractError: with both numbers, the bound and the worst token.
    """
    bound = learn.parity_stop or BOUNDS.get(parity.dtype, BOUNDS[torch.bfloat16])
    if not parity.mean_abs <= bound:
        raise ContractError(
            f"trainer and sampler disagree on sampled tokens before anything was learnt: mean "
            f"|logprob difference| {parity.mean_abs:.3g} nats over {parity.num_tokens} tokens "
            f"(bound {bound:g} in {str(parity.dtype).removeprefix('torch.')}), largest "
            f"{parity.max_abs:.3g} at {parity.worst}",
            hint="check that the engine serves the weights being trained, samples at the "
            "temperature that it reports, and loads the same files; a difference that is only "
            "rounding can be allowed with learn.parity_stop",
        )
