"""What a run adds to its policy loss: the entropy method and the KL to a reference.

    begin(step, micros, ...) -> Terms     reference logprobs and chosen tokens, before the update
      .advantages(i, out)                 of micro-batch i, just before the policy loss
      .penalty(i, out)                    what is added to it
    end(step, sums)                       moves the controllers; metrics and alarms

Guarantees: everything that needs the whole step (means, choices, counts) is decided in `begin`, so
no term depends on the split into micro-batches or ranks; counts are of sampled tokens, so
demonstrations in the same step change none of it; a step that was not applied moves no controller.

Takes: EntropyConfig, KLConfig, micro-batches. Gives: terms, metrics, alarms and a state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from treadle.algorithms import Algorithm, loss_options
from treadle.batch import MicroBatch
from treadle.config import EntropyConfig, LearnConfig
from treadle.errors import WeightsError
from treadle.train.entropy import Dial, EntropyControl, canonical_order, clip_cov, kl_cov
from treadle.train.forward import Forward, TrainablePolicy, forward
from treadle.train.kl import KLControl, ReferencePolicy
from treadle.train.ranks import gathered, own
from treadle.types import Sample

PolicyLoss = Callable[[int, Forward], Tensor]
"""The policy loss of micro-batch i, from its forward."""

METRICS: dict[str, str] = {
    "loss/entropy": "the entropy term of the loss (bonus, sac, kl_cov), strength included; absent "
    "for methods that have none",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """Of one step, fixed for all its micro-batches."""

    dial: Dial | None
    kl: KLControl | None
    references: Mapping[int, Tensor] = field(default_factory=dict)
    """log pi_ref of this rank's micro-batches by their place in the step, where there is a KL
    term."""
    chosen: Sequence[Tensor] = ()
    """Tokens of every micro-batch of the step that clip_cov or kl_cov chose."""
    num_tokens: int = 0
    """Sampled tokens of the step."""
    num_rows: int = 0
    """Rows of the step that have one."""

    @property
    def entropy_gradient(self) -> bool:
        """The forward's entropies must carry a gradient."""
        return self.dial is not None and self.dial.needs_entropy_gradient

    def rewarded(self, i: int, out: Forward) -> Tensor:
        """The advantages after what the reward pays for distance."""
        if self.kl is None:
            return out.advantage
        return self.kl.advantage(
            out.advantage, out.logp, self.references[i], sampled(out), out.sequence
        )

    def advantages(self, i: int, out: Forward) -> Tensor:
        """The advantages that the policy loss of micro-batch i sees."""
        advantage = self.rewarded(i, out)
        if self.dial is None:
            return advantage
        chosen = self.chosen[i] if self.chosen else None
        changed = self.dial.advantage(
            advantage, out.logp.detach(), out.entropy.detach(), sampled(out), chosen
        )
        return torch.where(sampled(out), changed, advantage)

    def penalty(self, i: int, out: Forward) -> tuple[Tensor | None, dict[str, Tensor]]:
        """What micro-batch i adds to the loss, and sums for `end`, detached."""
        mask, total = sampled(out), None
        sums: dict[str, Tensor] = {
            "sampled_entropy": torch.where(mask, out.entropy.detach(), 0.0).sum(),
        }
        if self.num_tokens == 0:  # of demonstrations alone: there is nothing to average over
            return None, sums
        if self.dial is not None:
            total = self.dial.penalty(
                out.logp,
                out.behaviour_logp,
                out.entropy,
                mask,
                out.weight,
                num_tokens=self.num_tokens,
                chosen=self.chosen[i] if self.chosen else None,
            )
            if total is not None:
                sums["entropy_term"] = total.detach()
        if self.kl is not None:
            term = self.kl.penalty(
                out.logp,
                out.behaviour_logp,
                self.references[i],
                mask,
                num_tokens=self.num_tokens,
            )
            sums |= self.kl.stats(out.logp, self.references[i], mask)
            if term is not None:
                sums["kl_term"] = term.detach()
                total = term if total is None else total + term
        return total, sums


def sampled(out: Forward) -> Tensor:
    """Tokens that were sampled, and not demonstrated: the latter have no behaviour logprob."""
    return out.trained & torch.isfinite(out.behaviour_logp)


def entropy_control(config: EntropyConfig, algorithm: Algorithm) -> EntropyControl:
    """The control of a run with this algorithm.

    Raises:
        ConfigError: a method that moves `clip_high`, with a loss that has none.
    """
    options = {**loss_options(algorithm.loss), **algorithm.options}
    return EntropyControl(config, clip_high=options.get("clip_high"), loss=algorithm.loss)


def check_terms(learn: LearnConfig, algorithm: Algorithm) -> None:
    """Raises ConfigError: what `learn` adds does not go with the run's algorithm."""
    if learn.entropy is not None:
        entropy_control(learn.entropy, algorithm)


class Regulariser:
    """Owns the controllers of a run."""

    def __init__(
        self,
        policy: TrainablePolicy,
        learn: LearnConfig,
        *,
        seed: int,
        algorithm: Algorithm,
    ) -> None:
        """
        Args:
            policy: with a KL term also a ReferencePolicy; what it is now becomes the reference.
            algorithm: of the run.

        Raises:
            ConfigError: an entropy method that the loss cannot serve.
        """
        self._policy = policy
        self._seed = seed
        self.entropy = None
        if learn.entropy is not None:
            self.entropy = entropy_control(learn.entropy, algorithm)
        self.kl = None
        if learn.kl is not None:
            self.kl = KLControl(learn.kl, cast(ReferencePolicy, policy))

    def dial(self, step: int) -> Dial | None:
        return None if self.entropy is None else self.entropy.start(step)

    def clip_shift(self, step: int) -> float:
        """What the step adds to `clip_high` of the run's loss."""
        dial = self.dial(step)
        return 0.0 if dial is None else dial.clip_shift

    def moves_without_advantage(self, step: int) -> bool:
        """A step whose advantages are all 0 is worth a pass."""
        dial = self.dial(step)
        return self.kl is not None or (dial is not None and dial.acts_without_advantage)

    def begin(
        self,
        step: int,
        samples: Sequence[Sample],
        micros: Sequence[MicroBatch],
        policy_loss: PolicyLoss,
    ) -> Terms:
        """Everything that is decided before the step is trained on.

        Args:
            policy_loss: what the step will minimise; asked, for clip_cov alone, which tokens it
                gives a gradient.
        """
        references: dict[int, Tensor] = {}
        if self.kl is not None:
            mine = own(len(micros))
            found = self.kl.references([micros[i] for i in mine])
            references = dict(zip(mine, found, strict=True))
        terms = Terms(
            dial=self.dial(step),
            kl=self.kl,
            references=references,
            num_tokens=sum(int(np.isfinite(m.behaviour).sum()) for m in micros),
            num_rows=sum(len(np.unique(m.row[np.isfinite(m.behaviour)])) for m in micros),
        )
        if terms.dial is None or not terms.dial.selects or terms.num_tokens == 0:
            return terms
        return replace(terms, chosen=self._choose(step, samples, micros, terms, policy_loss))

    def _choose(
        self,
        step: int,
        samples: Sequence[Sample],
        micros: Sequence[MicroBatch],
        terms: Terms,
        policy_loss: PolicyLoss,
    ) -> list[Tensor]:
        """Masks over the tokens of every micro-batch, by statistics of the whole step."""
        assert self.entropy is not None and terms.dial is not None
        config, clips = self.entropy.config, terms.dial.method == "clip_cov"
        columns: list[tuple[np.ndarray, ...]] = []
        for i in own(len(micros)):
            with torch.no_grad():
                out = forward(self._policy, micros[i])
                out = replace(out, advantage=terms.rewarded(i, out))
            free = sampled(out)
            if clips:
                leaf = out.logp.clone().requires_grad_()
                loss = policy_loss(i, replace(out, logp=leaf))
                free = free & (torch.autograd.grad(loss, leaf)[0] != 0)
            columns.append(
                tuple(x.cpu().numpy() for x in (out.advantage, out.logp, sampled(out), free))
            )
        advantage, logp, mask, free = (
            np.concatenate(c) for c in zip(*gathered(columns), strict=True)
        )
        row = np.concatenate([m.row for m in micros])[mask]
        position = np.concatenate([m.position for m in micros])[mask]
        rank = canonical_order(samples, row, position)
        share = config.setting("share")
        if clips:
            found = clip_cov(
                advantage[mask],
                logp[mask],
                free[mask],
                rank,
                share=share,
                bounds=config.setting("bounds"),
                seed=self._seed,
                step=step,
            )
        else:
            found = kl_cov(advantage[mask], logp[mask], rank, share=share)
        chosen = np.zeros(len(mask), dtype=np.bool_)
        chosen[np.flatnonzero(mask)[found]] = True
        cuts = np.cumsum([m.num_trained for m in micros])[:-1]
        device = self._policy.device
        return [torch.tensor(part, device=device) for part in np.split(chosen, cuts)]

    def end(
        self, step: int, terms: Terms, sums: Callable[[str], float], *, applied: bool
    ) -> tuple[dict[str, float], tuple[str, ...]]:
        """Metrics of the step and alarms as sentences; then the controllers move.

        Args:
            sums: of what `Terms.penalty` gave, over the step, by name.
            applied: the update was made.
        """
        metrics: dict[str, float] = {}
        alarms: list[str] = []
        n = terms.num_tokens
        if n == 0:
            return metrics, ()
        if self.entropy is not None:
            entropy = sums("sampled_entropy") / n if applied else float("nan")
            found, alarm = self.entropy.measure(step, entropy)
            metrics |= found
            alarms += [alarm] if alarm else []
            if terms.chosen:
                chosen = sum(int(mask.sum()) for mask in terms.chosen)
                metrics["entropy/chosen_frac"] = chosen / n
            if terms.entropy_gradient or (terms.dial is not None and terms.dial.method == "kl_cov"):
                metrics["loss/entropy"] = sums("entropy_term")
        if self.kl is not None:
            metrics |= self.kl.measure(
                sums("reference_k1"),
                sums("reference_k3"),
                num_tokens=n,
                num_rows=terms.num_rows,
                move=applied,
            )
            if self.kl.in_loss:
                metrics["loss/kl"] = sums("kl_term")
        return metrics, tuple(alarms)

    def state_dict(self) -> dict[str, Any]:
        """Of the controllers there are, by name; plain values."""
        parts = {"entropy": self.entropy, "kl": self.kl}
        return {name: part.state_dict() for name, part in parts.items() if part is not None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`; other keys are somebody else's.

        Raises:
            WeightsError: the state has a controller that the run has not, or the reverse, or of
                another method.
        """
        for name, part in (("entropy", self.entropy), ("kl", self.kl)):
            if (part is None) != (name not in state):
                raise WeightsError(
                    f"the checkpoint has {'no' if name not in state else 'a'} controller of "
                    f"learn.{name}, the run has {'none' if part is None else 'one'}",
                    hint=f"resume with the learn.{name} of the run that saved it",
                )
            if part is not None:
                part.load_state_dict(state[name])
