"""AdamW with warm-up, a global gradient norm, and a guard against updates that are not finite.

Guarantees:
- a non-finite loss or gradient moves neither weights nor moments; it is counted, and several in a
  row end the run;
- the state round-trips bit for bit: the update after `load_state_dict` is the one that would have
  followed without it.

Takes: gradients on the policy's parameters. Gives: moved parameters and what was done, in numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from treadle.config import LearnConfig
from treadle.errors import ContractError, WeightsError

_MOMENTS = ("step", "exp_avg", "exp_avg_sq")
"""What AdamW keeps per parameter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """One call of `Optimiser.apply`."""

    applied: bool
    grad_norm: float
    """Global L2 norm before clipping."""
    lr: float
    """Rate of this update; where it was skipped, the rate it would have had."""


class Optimiser:
    """Owns moments and counters; the parameters stay the policy's."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], learn: LearnConfig) -> None:
        """
        Args:
            parameters: float32, by name; the names are those of the saved state.
            learn: lr, warmup_steps, betas, weight_decay, grad_clip, max_nan_steps.

        Raises:
            ContractError: there are no parameters, or one is not float32.
        """
        self._parameters = dict(parameters)
        self._learn = learn
        if not self._parameters:
            raise ContractError("the policy has no trainable parameters")
        for name, parameter in self._parameters.items():
            if parameter.dtype != torch.float32:
                raise ContractError(
                    f"parameter {name} is {parameter.dtype}, expected torch.float32: small "
                    "updates are lost in fewer bits"
                )
        self._adamw = torch.optim.AdamW(
            list(self._parameters.values()),
            lr=learn.lr,
            betas=learn.betas,
            weight_decay=learn.weight_decay,
            fused=True,
        )
        self.updates = 0
        """Updates applied so far; skipped ones do not count."""
        self.skipped_in_a_row = 0

    @property
    def lr(self) -> float:
        """Rate of the next update: linear from lr / warmup_steps, then constant."""
        warmup = self._learn.warmup_steps
        return self._learn.lr * min(1.0, (self.updates + 1) / warmup if warmup else 1.0)

    def clear(self) -> None:
        """Forget the gradients."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def apply(self, loss: float, *, where: str) -> Update:
        """Clip and apply the gradients, then clear them.

        Args:
            loss: of the step, for the check and the message.
            where: names the step in a message, e.g. "step 7".

        Raises:
            ContractError: no gradient reached any parameter, or `max_nan_steps` updates in a row
                were not finite.
        """
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        if not gradients:
            raise ContractError(
                f"{where}: no gradient reached any of the {len(self._parameters)} parameters: "
                "nothing would be learnt"
            )
        norm = torch.nn.utils.get_total_norm(gradients)
        grad_norm, lr = float(norm), self.lr
        applied = math.isfinite(loss) and math.isfinite(grad_norm)
        if applied:
            if self._learn.grad_clip > 0:
                torch.nn.utils.clip_grads_with_norm_(
                    self._parameters.values(), self._learn.grad_clip, norm
                )
            for options in self._adamw.param_groups:
                options["lr"] = lr
            self._adamw.step()
            # The fused kernel writes without telling autograd; whoever derived something from the
            # parameters finds out by their version counters.
            torch.autograd.graph.increment_version(list(self._parameters.values()))
            self.updates += 1
            self.skipped_in_a_row = 0
        else:
            self.skipped_in_a_row += 1
        self.clear()
        if self.skipped_in_a_row >= self._learn.max_nan_steps:
            raise ContractError(
                f"{self.skipped_in_a_row} steps in a row were not finite; the last, {where}, had "
                f"loss/total = {loss} and grad/norm = {grad_norm} after {self.updates} good "
                "updates. Weights and moments are those of the last good one",
                hint="lower learn.lr (now "
                f"{self._learn.lr:g}) or add learn.warmup_steps; if it happens at once, check "
                "ratio/max and policy/kl_k3_nats of the steps before",
            )
        return Update(applied=applied, grad_norm=grad_norm, lr=lr)

    def state_dict(self) -> dict[str, Any]:
        """Copies: {"tensors": {"NAME.exp_avg": ...}, "counters": {"updates": ...}}."""
        tensors = {
            f"{name}.{moment}": self._adamw.state[parameter][moment].detach().clone()
            for name, parameter in self._parameters.items()
            if parameter in self._adamw.state
            for moment in _MOMENTS
        }
        counters = {"updates": self.updates, "skipped_in_a_row": self.skipped_in_a_row}
        return {"tensors": tensors, "counters": counters}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`; tensors are copied and put on the parameters' device.

        Raises:
            WeightsError: the state belongs to other parameters, or a shape differs.
        """
        tensors: Mapping[str, torch.Tensor] = state["tensors"]
        known = {f"{name}.{moment}" for name in self._parameters for moment in _MOMENTS}
        if unknown := sorted(set(tensors) - known):
            raise WeightsError(
                f"the optimiser state has {len(unknown)} tensors that this policy does not have, "
                f"first {unknown[0]}",
                hint="resume with the model and LoRA settings of the run that saved it",
            )
        fresh: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        for name, parameter in self._parameters.items():
            found = {m: tensors[f"{name}.{m}"] for m in _MOMENTS if f"{name}.{m}" in tensors}
            if not found:
                continue
            shapes = [tuple(x.shape) for m, x in found.items() if m != "step"]
            if len(found) < len(_MOMENTS) or any(s != tuple(parameter.shape) for s in shapes):
                raise WeightsError(
                    f"the optimiser state of {name} has {sorted(found)} with shapes {shapes}, "
                    f"expected {list(_MOMENTS)} of shape {tuple(parameter.shape)}"
                )
            fresh[parameter] = {m: x.to(parameter.device, copy=True) for m, x in found.items()}
        if state["counters"]["updates"] > 0 and not fresh:
            raise WeightsError(
                f"the optimiser state says {state['counters']['updates']} updates but has no "
                "moments"
            )
        self._adamw.state.clear()
        self._adamw.state.update(fresh)
        self.updates = int(state["counters"]["updates"])
        self.skipped_in_a_row = int(state["counters"]["skipped_in_a_row"])
