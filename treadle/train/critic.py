"""PPO's critic in a training step: from outcomes to advantages per token, and its own updates.

    rows (outcome R on every trained token)
      -> V of every trained token, by the critic before the step
      -> reward R at the row's last trained token, GAE along the row -> advantages, returns
      -> advantages whitened over the trained tokens of all rows of the step
      -> `steps` updates of the critic towards the returns, each over all rows

Guarantees:
- nothing depends on the split into micro-batches or ranks, nor on the order of rows: returns are
  made per row, whitening and denominators are those of the step;
- observations are stepped over: their values are never computed, and what stands between two turns
  changes no return (the context that it gives to later values excepted);
- a rollout of several branches is several rows, and each ends with the whole outcome: every branch
  is judged as if it alone had led there. Tokens that branches share belong to the first row that
  has them, and are discounted along it;
- the samples are never written to: what the ledger holds is the outcome, so a step that is applied
  again computes the same advantages from the same critic;
- critic and policy move by optimisers of their own; the critic's state round-trips bit for bit.

Takes: Samples whose algorithm's advantage is `gae`. Gives: Samples with advantages, and metrics.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treadle.advantage import gae, whiten
from treadle.advantage.judged import equal
from treadle.batch import MicroBatch, pack
from treadle.config import CriticConfig, LearnConfig
from treadle.errors import ContractError
from treadle.losses import value_loss
from treadle.models.value import Trunk, ValueModel
from treadle.train.optim import Optimiser
from treadle.train.ranks import add_gradients, added, gathered, own
from treadle.types import Sample

METRICS: dict[str, str] = {
    "value/loss": "half of the squared error of the values that the step's advantages were made "
    "with, tokens weighed by the step's aggregation, before coef; in squared reward units",
    "value/explained_variance": "1 - variance(return - value) / variance(return) over the trained "
    "tokens, values before the update: 1 = the values are the returns, 0 = no better than one "
    "number for all, below 0 = worse; absent where all returns are equal",
    "value/clipped_frac": "share of trained tokens whose gradient the clip of the value loss cuts, "
    "in the last of the critic's updates of the step; absent where it makes one",
    "value/grad_norm": "global L2 norm of the gradient of coef x value loss with respect to the "
    "critic's own parameters, before clipping, in its last update of the step",
    "value/actor_frozen": "1 when the step trained the critic alone: in its warm-up, or because "
    "all advantages were 0",
}
"""Absent in a run without a critic, and in a step without a row that it judges."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Valued:
    """The critic's view of one step, before it learns from it."""

    samples: list[Sample]
    """All rows of the step, in order; those that the critic judges with its advantages."""
    micros: tuple[MicroBatch, ...]
    """Of the judged rows alone."""
    features: Mapping[int, Tensor]
    """Of this rank's micro-batches by their place in the step, where the trunk does not move with
    the critic; else empty."""
    old: tuple[Tensor, ...]
    """V [n] of every micro-batch."""
    returns: tuple[Tensor, ...]
    """GAE's targets [n], not whitened."""


class Critic:
    """Owns the value model and its optimiser."""

    def __init__(
        self, config: CriticConfig, learn: LearnConfig, policy: Trunk, own: Trunk | None
    ) -> None:
        """
        Args:
            learn: of the run; the optimiser's settings but for rate and warm-up are its.
            policy: whose hidden states a critic of kind "head" reads.
            own: the trunk of kind "model", which nothing else trains.

        Raises:
            ContractError: kind "model" without a trunk, or a trunk that nothing reads.
        """
        if (own is not None) != (config.kind == "model"):
            raise ContractError(
                f"a critic of kind `{config.kind}` was given {'no' if own is None else 'a'} model "
                "of its own"
            )
        self.config = config
        self.model = ValueModel(
            policy if own is None else own,
            own=own is not None,
            trunk_gradient=own is not None or config.trunk_gradient,
        )
        self._device = policy.device
        self._micro_tokens = learn.micro_tokens
        self._optimiser = Optimiser(
            self.model.parameters(),
            replace(learn, lr=learn.lr * config.lr_scale, warmup_steps=0),
        )
        self._rounds = 0

    @property
    def warming_up(self) -> bool:
        """The policy waits: the critic has learnt from fewer than `warmup_steps` steps."""
        return self._rounds < self.config.warmup_steps

    def value(
        self, samples: Sequence[Sample], judged: Sequence[bool], weights: Sequence[float]
    ) -> Valued:
        """Advantages of the judged rows.

        Args:
            samples: all rows of the step.
            judged: which of them the critic judges: their advantages are outcomes, one number per
                row.
            weights: of each row's tokens.

        Raises:
            ContractError: a row has several outcomes; a value is not finite.
        """
        rows = [i for i, mine in enumerate(judged) if mine]
        if not rows:
            return Valued(samples=list(samples), micros=(), features={}, old=(), returns=())
        outcomes = [_outcome(samples[i]) for i in rows]
        micros = pack(
            [samples[i] for i in rows],
            micro_tokens=self._micro_tokens,
            weights=[weights[i] for i in rows],
        )
        features, mine = dict[int, Tensor](), list[NDArray[np.float32]]()
        with torch.no_grad():
            for i in own(len(micros)):
                found = self._features(micros[i])
                mine.append(self.model.values(found).cpu().numpy())
                if not self.model.trunk_gradient:
                    features[i] = found
        old = gathered(mine)
        # Rows side by side, each reduced to its trained tokens: the others are stepped over.
        place = np.concatenate([micro.row for micro in micros])
        counts = np.bincount(place, minlength=len(rows))
        mask = np.arange(counts.max()) < counts[:, None]
        at = np.concatenate([_rank(micro.row) for micro in micros])
        values = np.zeros(mask.shape)
        values[place, at] = np.concatenate(old)
        rewards = np.zeros(mask.shape)
        rewards[np.arange(len(rows)), counts - 1] = outcomes
        raw, returns = gae(rewards, values, mask, gamma=self.config.gamma, lam=self.config.lam)
        advantages = whiten(raw, mask)
        out = list(samples)
        for line, i in enumerate(rows):
            out[i] = _with(samples[i], advantages[line, : counts[line]])
        targets = np.split(
            returns[place, at].astype(np.float32), np.cumsum([m.num_trained for m in micros])[:-1]
        )
        return Valued(
            samples=out,
            micros=tuple(micros),
            features=features,
            old=tuple(torch.tensor(v, device=self._device) for v in old),
            returns=tuple(torch.tensor(t, device=self._device) for t in targets),
        )

    def update(self, valued: Valued, *, step: int) -> dict[str, float]:
        """Learn from the step, `steps` times; gives metrics.

        With `trunk_gradient` of a head, the mean over these times is added to the gradients of the
        policy's parameters, which nothing here applies or clears.

        Raises:
            ContractError: too many updates in a row were not finite.
        """
        if not valued.micros:
            return {}
        metrics = _explained(valued)
        times, applied = self.config.steps, False
        # What reaches the policy's weights is applied once, whatever the number of times.
        shared = self.config.kind == "head" and self.config.trunk_gradient
        scale = self.config.coef / (times if shared else 1)
        for time in range(times):
            mine = defaultdict[str, float](float)
            for i in own(len(valued.micros)):
                micro = valued.micros[i]
                features = valued.features[i] if valued.features else self._features(micro)
                out = value_loss(
                    self.model.values(features),
                    valued.old[i],
                    valued.returns[i],
                    torch.ones_like(valued.old[i], dtype=torch.bool),
                    torch.tensor(micro.weight, device=self._device),
                    clip=self.config.value_clip,
                )
                (scale * out.loss).backward()
                sums = torch.stack([out.loss.detach(), *out.stats.values()]).tolist()
                for name, value in zip(("loss", *out.stats), sums, strict=True):
                    mine[name] += value
            found = added(mine)
            add_gradients(self.model.parameters().values())
            update = self._optimiser.apply(
                found["loss"], where=f"update {time + 1} of the critic, {step=}"
            )
            if update.applied:
                self.model.refresh()
                applied = True
            if time == 0:
                metrics["value/loss"] = found["loss"]
            else:
                metrics["value/clipped_frac"] = (
                    found["value_clipped_tokens"] / found["value_tokens"]
                )
            metrics["value/grad_norm"] = update.grad_norm
        self._rounds += applied
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Copies of parameters, moments and counters."""
        return {
            "kind": self.config.kind,
            "parameters": self.model.state_dict(),
            "optimiser": self._optimiser.state_dict(),
            "rounds": self._rounds,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`.

        Raises:
            WeightsError: the state is of another critic.
        """
        self.model.load_state_dict(state["parameters"])
        self._optimiser.load_state_dict(state["optimiser"])
        self._rounds = int(state["rounds"])

    def _features(self, micro: MicroBatch) -> Tensor:
        ids = torch.tensor(micro.ids, device=self._device)
        index = torch.tensor(micro.index, device=self._device)
        return self.model.features(ids, micro.layout, index)


def _outcome(sample: Sample) -> float:
    """The reward that stands at the row's last trained token."""
    outcomes = {a for a, t in zip(sample.advantages, sample.trained, strict=True) if t}
    if len(outcomes) != 1:
        raise ContractError(
            f"trajectory {sample.trajectory_id}: the trained tokens of a row have "
            f"{len(outcomes)} different outcomes, from {min(outcomes, default=0)} to "
            f"{max(outcomes, default=0)}: a critic takes one per row",
            hint="credit by turn, span or party does not go with the advantage `gae`, which "
            "credits every token by itself",
        )
    return outcomes.pop()


def _rank(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Of each token among those of its row; the tokens of a row are neighbours, in order."""
    starts = np.flatnonzero(np.diff(rows, prepend=-1))
    return np.arange(len(rows)) - np.repeat(starts, np.diff(starts, append=len(rows)))


def _with(sample: Sample, advantages: NDArray[np.float64]) -> Sample:
    out = np.full(len(sample.ids), np.nan)
    out[np.asarray(sample.trained)] = advantages
    return replace(sample, advantages=tuple(out.tolist()))


def _explained(valued: Valued) -> dict[str, float]:
    returns = torch.cat(valued.returns).double()
    if equal(returns.tolist()):
        return {}
    left = (returns - torch.cat(valued.old).double()).var(correction=0)
    return {"value/explained_variance": float(1 - left / returns.var(correction=0))}
