"""The entropy method of a run, with its state: what it changes in a step, what it learns from it.

    start(step) -> Dial         fixed for the step: the same for all its micro-batches
      .advantage(...)           advantages to train with              repo_r, repo_d, clip_cov
      .clip_shift               added to the loss's own clip_high     adapo, mai
      .penalty(...)             a term of the loss                    bonus, sac, kl_cov
    measure(step, entropy)      moves the controller, once per step

Guarantees:
- the value that a step trains with depends on the entropies of earlier steps alone, so a step has
  one value however it is split;
- `state_dict` is all there is: a control that loads it goes on with the same bits;
- what cannot be measured moves nothing: a step that was skipped, or an entropy that is not finite.

Takes: an EntropyConfig and one mean entropy per step. Gives: Dials, metrics and alarms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from treadle.config import EntropyConfig
from treadle.errors import ConfigError, WeightsError, setting
from treadle.train.entropy.advantage import repo_d, repo_r
from treadle.train.entropy.controllers import next_by_rate, next_by_steps, next_zeta, target_at

SELECTING = ("clip_cov", "kl_cov")
"""Methods that choose tokens, from log-probabilities of the whole step."""

METRICS: dict[str, str] = {
    "entropy/control": "value that the entropy method trained this step with: zeta (repo_r), beta "
    "(repo_d), clip_high (adapo), slack of it (mai), coefficient (bonus, sac, kl_cov), share of "
    "chosen tokens (clip_cov)",
    "entropy/target_nats": "entropy H* that the controller holds at this step",
    "entropy/error_nats": "measured entropy minus its target; 0 is good",
    "entropy/at_limit_steps": "steps in a row in which the controller stood at the end of its "
    "bounds and the entropy was still short of the target; 0 is good",
    "entropy/chosen_frac": "share of trained tokens that clip_cov or kl_cov chose",
}
"""Absent where the method does not have them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dial:
    """The entropy method as one step applies it. Pure functions of packed vectors."""

    method: str
    value: float
    clip_shift: float = 0.0
    """What is added to `clip_high` of the run's loss; others move in proportion."""

    @property
    def selects(self) -> bool:
        """It needs a mask of chosen tokens (see covariance.py)."""
        return self.method in SELECTING

    @property
    def needs_entropy_gradient(self) -> bool:
        """`penalty` is a function of entropies that carry a gradient."""
        return self.method in ("bonus", "sac") and self.value > 0

    @property
    def acts_without_advantage(self) -> bool:
        """A step whose advantages are all 0 still moves the entropy."""
        return self.needs_entropy_gradient or (self.method == "repo_d" and self.value != 0)

    def advantage(
        self,
        advantage: Tensor,
        logp: Tensor,
        entropy: Tensor,
        trained: Tensor,
        chosen: Tensor | None = None,
    ) -> Tensor:
        """The advantages to train with, just before any loss; the same object where it does
        nothing.

        Args:
            chosen: tokens that clip_cov or kl_cov chose.
        """
        if self.method == "repo_r":
            return repo_r(advantage, logp, trained, zeta=self.value)
        if self.method == "repo_d":
            return repo_d(advantage, logp, entropy, trained, beta=self.value)
        if self.method == "clip_cov" and chosen is not None:
            return torch.where(chosen, 0.0, advantage)
        return advantage

    def penalty(
        self,
        logp: Tensor,
        behaviour_logp: Tensor,
        entropy: Tensor,
        trained: Tensor,
        weight: Tensor,
        *,
        num_tokens: int,
        chosen: Tensor | None = None,
    ) -> Tensor | None:
        """A term to add to the loss of a micro-batch, or None.

        Args:
            entropy: with gradient where `needs_entropy_gradient`.
            weight: of the policy loss of each token; kl_cov adds to that loss.
            num_tokens: trained tokens of the whole step: the denominator of a bonus, which is on
                the mean entropy whatever the loss's aggregation.
        """
        if self.needs_entropy_gradient:
            return -self.value * torch.where(trained, entropy, 0.0).sum() / num_tokens
        if self.method == "kl_cov" and chosen is not None:
            chosen = chosen & trained
            moved = torch.where(chosen, logp, 0.0) - torch.where(chosen, behaviour_logp, 0.0)
            return self.value * (torch.where(chosen, weight, 0.0) * moved.abs()).sum()
        return None


class EntropyControl:
    """See the module's docstring."""

    def __init__(
        self, config: EntropyConfig, *, clip_high: float | None = None, loss: str = ""
    ) -> None:
        """
        Args:
            clip_high: of the run's policy loss; None = it has no such bound.
            loss: its name, for messages.

        Raises:
            ConfigError: a method that moves `clip_high`, with a loss that has none, or whose own
                is outside of the method's bounds.
        """
        self.config = config
        self._clip_high = clip_high
        low, high = config.setting("bounds") or (0.0, 0.0)
        start = config.setting("strength")
        if config.method in ("adapo", "mai") and clip_high is None:
            raise ConfigError(
                f"entropy method `{config.method}` moves clip_high, but loss `{loss}` has none",
                hint=f"take a loss that clips its ratio, e.g. {setting('learn.loss=ppo_clip')}, or "
                "method repo_r, which works with every loss",
            )
        if config.method == "adapo" and clip_high is not None:
            start = clip_high
            if not low <= clip_high <= high:
                raise ConfigError(
                    f"entropy method `adapo` starts at the clip_high of loss `{loss}`, which is "
                    f"{clip_high:g}, outside of its bounds {low:g}..{high:g}",
                    hint="set learn.entropy.bounds around it, and learn.entropy.rate to match",
                )
        self._value = config.setting("share") if start is None else float(start)
        self._initial: float | None = None
        self._last: float | None = None
        self._at_limit = 0

    @property
    def value(self) -> float:
        """Of the controller, for the next step."""
        return self._value

    def target(self, step: int) -> float | None:
        """H* of a step in nats; None = not known before the first measurement, or none at all."""
        target = self.config.target
        if not self._closed_loop:
            return None
        if isinstance(target, tuple):
            return target_at(target, step)
        return self._initial if target is None or target == "initial" else float(target)

    @property
    def _closed_loop(self) -> bool:
        return self.config.method not in ("repo_d", *SELECTING)

    def start(self, step: int) -> Dial:
        """What the step is trained with."""
        method, value, clip_shift = self.config.method, self._value, 0.0
        if method == "adapo":
            assert self._clip_high is not None
            clip_shift = value - self._clip_high
        elif method == "mai":
            clip_shift = value
        elif method == "bonus":
            # Active below the target only, by the newest measurement; off before the first.
            target = self.target(step)
            below = self._last is not None and target is not None and self._last < target
            value = value if below else 0.0
        elif method == "clip_cov":
            value = self.config.setting("share")
        return Dial(method=method, value=value, clip_shift=clip_shift)

    def measure(self, step: int, entropy: float) -> tuple[dict[str, float], str]:
        """Learn the mean entropy that a step was trained at, and move the controller.

        Args:
            entropy: mean over the trained tokens of the whole step, weights before the update.

        Returns:
            metrics of the step (`entropy/control` is the value it was trained with), and an alarm
            as a sentence, or "".
        """
        metrics = {"entropy/control": self.start(step).value}
        if not self._closed_loop or not math.isfinite(entropy):
            return metrics, ""
        if self._initial is None:
            self._initial = entropy
        self._last = entropy
        target = self.target(step)
        assert target is not None
        before, self._value = self._value, self._next(entropy, target)
        stuck = self._value == before and entropy != target and self._short(entropy, target)
        self._at_limit = self._at_limit + 1 if stuck else 0
        metrics |= {
            "entropy/target_nats": target,
            "entropy/error_nats": entropy - target,
            "entropy/at_limit_steps": float(self._at_limit),
        }
        alarm = ""
        if self._at_limit == self.config.alarm_steps:
            alarm = (
                f"the entropy is {entropy:.3g} nats, its target {target:.3g}, and the controller "
                f"of `{self.config.method}` has been at its limit of {before:g} for "
                f"{self._at_limit} steps: it has no more authority. Widen learn.entropy.bounds, "
                "take another method, or another target"
            )
        return metrics, alarm

    def _next(self, entropy: float, target: float) -> float:
        bounds, rate = self.config.setting("bounds"), self.config.setting("rate")
        if self.config.method == "repo_r":
            return next_zeta(self._value, entropy, target, bounds=bounds)
        if self.config.method == "sac":
            return next_by_rate(self._value, entropy, target, bounds=bounds, rate=rate)
        return next_by_steps(self._value, entropy, target, bounds=bounds, rate=rate)

    def _short(self, entropy: float, target: float) -> bool:
        """The target is on the side that the method works towards: only repo_r and adapo work
        towards less entropy too; the others are off there, which is no lack."""
        return entropy < target or self.config.method in ("repo_r", "adapo")

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "method": self.config.method,
            "value": self._value,
            "initial": self._initial,
            "last": self._last,
            "at_limit": self._at_limit,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`.

        Raises:
            WeightsError: the state is of another method.
        """
        if state.get("method") != self.config.method:
            raise WeightsError(
                f"the checkpoint holds a controller of `{state.get('method')}`, the run has "
                f"`{self.config.method}`",
                hint="resume with the learn.entropy of the run that saved it",
            )
        self._value = float(state["value"])
        self._initial = None if state["initial"] is None else float(state["initial"])
        self._last = None if state["last"] is None else float(state["last"])
        self._at_limit = int(state["at_limit"])
