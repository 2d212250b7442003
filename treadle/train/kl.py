"""The KL term of a run: its reference, its strength, and what is reported of it.

    references(policy, micros)   logprobs of the reference, once per step, before the update
      .advantage(...)            advantages that pay for distance        k1_in_reward
      .penalty(...)              a term of the loss                      the others
    measure(...)                 moves an adaptive strength, once per step

Guarantees: the reference is what the policy was when the trainer was made (the start of the run,
also after a resume: it is made before a checkpoint is loaded); policy and reference are scored at
the same temperature; the adapter is back on after any failure; the strength is bounded, and its
state round-trips bit for bit.

Takes: a KLConfig, a policy, micro-batches. Gives: terms, metrics and a state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from treadle.batch import MicroBatch
from treadle.config import KLConfig
from treadle.errors import WeightsError
from treadle.losses.kl import kl_in_reward, kl_loss, kl_per_token
from treadle.train.forward import TrainablePolicy, forward

METRICS: dict[str, str] = {
    "kl/reference_k1_nats": "mean log pi - log pi_ref of the trained tokens, weights before the "
    "update: an estimate of KL(policy || reference) that may be negative",
    "kl/reference_k3_nats": "mean k3 estimate of KL(policy || reference), weights before the "
    "update; >= 0",
    "kl/reference_row_nats": "mean over rows of the sum of k3: KL(policy || reference) of a row, "
    "what an adaptive beta holds; >= 0",
    "kl/beta": "strength of the KL term in this step",
    "loss/kl": "the KL term of the loss, beta included; absent where it is in the reward",
}
"""Absent in a run without a KL term."""

MAX_ERROR = 0.2
"""Relative error of the KL that an adaptive strength answers to at most."""


class ReferencePolicy(TrainablePolicy, Protocol):
    """A policy that can also compute what it was; `treadle.models.policy.Policy` is one."""

    def freeze_reference(self) -> None:
        """What it computes now becomes the reference."""
        ...

    def reference(self) -> AbstractContextManager[None]:
        """Forwards of this thread are the reference's, without gradients."""
        ...


def next_beta(
    beta: float,
    kl_nats: float,
    target_nats: float,
    num_rows: int,
    *,
    horizon_rows: int,
    bounds: tuple[float, float],
) -> float:
    """beta (1 + e n / horizon), e = clip(KL / target - 1, -.2, .2), within bounds.

    Args:
        kl_nats: KL per row.
        num_rows: n, rows of the step.

    Source: Ziegler et al. (arXiv:1909.08593), with target 6 nats and horizon 10000 there.
    """
    error = min(max(kl_nats / target_nats - 1.0, -MAX_ERROR), MAX_ERROR)
    return min(max(beta * (1.0 + error * num_rows / horizon_rows), bounds[0]), bounds[1])


class KLControl:
    """See the module's docstring."""

    def __init__(self, config: KLConfig, policy: ReferencePolicy) -> None:
        self.config = config
        self._policy = policy
        self._beta = config.beta
        self._estimator, _, place = config.term.partition("_in_")
        self.in_loss = place == "loss"
        policy.freeze_reference()

    @property
    def beta(self) -> float:
        """For the next step."""
        return self._beta

    def references(self, micros: Sequence[MicroBatch]) -> list[Tensor]:
        """log pi_ref(target) in nats [n] of every micro-batch."""
        with self._policy.reference():
            return [forward(self._policy, micro).logp.detach() for micro in micros]

    def advantage(
        self, advantage: Tensor, logp: Tensor, reference: Tensor, trained: Tensor, sequence: Tensor
    ) -> Tensor:
        """The advantages to train with; the same object where the term is in the loss."""
        if self.in_loss:
            return advantage
        return kl_in_reward(
            advantage,
            logp.detach(),
            reference,
            trained,
            sequence,
            beta=self._beta,
            discount=self.config.discount,
        )

    def penalty(
        self,
        logp: Tensor,
        behaviour_logp: Tensor,
        reference: Tensor,
        trained: Tensor,
        *,
        num_tokens: int,
    ) -> Tensor | None:
        """The micro-batch's share of the KL term of the loss; None where it is in the reward."""
        if not self.in_loss:
            return None
        return kl_loss(
            logp,
            reference,
            trained,
            estimator=self._estimator,
            beta=self._beta,
            num_tokens=num_tokens,
            behaviour_logp=behaviour_logp,
        )

    def stats(self, logp: Tensor, reference: Tensor, trained: Tensor) -> dict[str, Tensor]:
        """Sums of a micro-batch for `measure`, by name, detached."""
        return {
            f"reference_{name}": kl_per_token(
                logp.detach(), reference, trained, estimator=name
            ).sum()
            for name in ("k1", "k3")
        }

    def measure(
        self, k1_sum: float, k3_sum: float, *, num_tokens: int, num_rows: int, move: bool = True
    ) -> dict[str, float]:
        """Metrics of the step, from the sums of `stats`; then an adaptive strength moves.

        Args:
            move: False for a step that was not applied.
        """
        metrics = {
            "kl/reference_k1_nats": k1_sum / num_tokens,
            "kl/reference_k3_nats": k3_sum / num_tokens,
            "kl/reference_row_nats": k3_sum / num_rows,
            "kl/beta": self._beta,
        }
        if move and self.config.target_nats and math.isfinite(k3_sum):
            self._beta = next_beta(
                self._beta,
                k3_sum / num_rows,
                self.config.target_nats,
                num_rows,
                horizon_rows=self.config.horizon_rows,
                bounds=self.config.bounds,
            )
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"term": self.config.term, "beta": self._beta}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`.

        Raises:
            WeightsError: the state is of another term.
        """
        if state.get("term") != self.config.term:
            raise WeightsError(
                f"the checkpoint holds the KL term `{state.get('term')}`, the run has "
                f"`{self.config.term}`",
                hint="resume with the learn.kl of the run that saved it",
            )
        self._beta = float(state["beta"])
