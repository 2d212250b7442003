"""The training forward of one micro-batch, and what a policy must offer for it.

Takes: a policy and a MicroBatch. Gives: log-probabilities and entropies of its trained tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from treadle.batch import MicroBatch
from treadle.losses import Tokens
from treadle.types import Layout, ModelShape


class TrainablePolicy(Protocol):
    """What the trainer needs of a policy; `treadle.models.policy.Policy` is one."""

    @property
    def shape(self) -> ModelShape: ...

    @property
    def dtype(self) -> torch.dtype:
        """Of the computation; the parameters are float32."""
        ...

    @property
    def device(self) -> str: ...

    def parameters(self) -> dict[str, nn.Parameter]:
        """What the optimiser owns, float32, by name; the order is fixed."""
        ...

    def refresh(self) -> None:
        """Recompute whatever was derived from the parameters, after they moved."""
        ...

    def hidden(self, ids: Tensor, layout: Layout) -> Tensor:
        """Last hidden states [N, hidden] of N packed ids, with gradient."""
        ...

    def logprobs(
        self,
        hidden: Tensor,
        targets: Tensor,
        temperature: float | Tensor,
        *,
        entropy_gradient: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """log pi(target) in nats with gradient and entropy in nats, without gradient unless asked;
        float32 [n] each."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Forward(Tokens):
    """One micro-batch after its forward: what a loss takes, on the policy's device, and more.

    `trained` is all True, as packing keeps trained tokens only; `behaviour_logp` is NaN for
    demonstrations.
    """

    entropy: Tensor
    """Entropy in nats over the full vocabulary, float32; detached unless a gradient was asked."""


def forward(
    policy: TrainablePolicy, micro: MicroBatch, *, entropy_gradient: bool = False
) -> Forward:
    """Score the trained tokens of a micro-batch with the current weights.

    The head runs on the trained positions alone: logits of prompt tokens are never computed.
    """
    device = policy.device
    ids = torch.tensor(micro.ids, device=device)
    index = torch.tensor(micro.index, device=device)
    targets = torch.tensor(micro.targets, device=device)
    temperature: float | Tensor = float(micro.temperature[0])
    if (micro.temperature != micro.temperature[0]).any():
        temperature = torch.tensor(micro.temperature, device=device)
    hidden = policy.hidden(ids, micro.layout).index_select(0, index)
    logp, entropy = policy.logprobs(hidden, targets, temperature, entropy_gradient=entropy_gradient)
    return Forward(
        logp=logp,
        entropy=entropy,
        behaviour_logp=torch.tensor(micro.behaviour, device=device),
        advantage=torch.tensor(micro.advantage, device=device),
        trained=torch.ones_like(targets, dtype=torch.bool),
        weight=torch.tensor(micro.weight, device=device),
        sequence=torch.tensor(micro.sequence, device=device),
        prox_logp=torch.tensor(micro.prox, device=device),
    )
