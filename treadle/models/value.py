"""A value model: one number per position, from the last hidden states of a trunk.

    head    trunk = the policy's, as it is at the moment; the linear layer alone is trained, unless
            a gradient into the policy's weights is asked for
    model   trunk = a model of its own (another adapter on the same frozen base, or in full
            fine-tuning another copy), trained with the layer

    V = w . h / |h| + b

The state's length is taken out, so that what one update of AdamW does to V depends neither on the
width nor on the last norm of the model: at most rate x sqrt(hidden), .07 at 3e-3 and 576.

Guarantees: the layer is float32 and starts at 0, so a new critic says 0 everywhere; the trunk's
weights are only ever changed through its own parameters; names of parameters are fixed, so a state
that belongs to another critic is refused and not half taken.

Takes: a trunk. Gives: V before each of the asked tokens, in reward units.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from treadle.errors import WeightsError
from treadle.types import Layout, ModelShape

HEAD = "value_head."
TRUNK = "trunk."
"""What names of parameters begin with."""


class Trunk(Protocol):
    """What a critic needs below its layer; `treadle.models.policy.Policy` is one."""

    @property
    def shape(self) -> ModelShape: ...

    @property
    def device(self) -> str: ...

    def parameters(self) -> dict[str, nn.Parameter]: ...

    def refresh(self) -> None: ...

    def hidden(self, ids: Tensor, layout: Layout) -> Tensor:
        """Last hidden states [N, hidden] of N packed ids, with gradient."""
        ...


class ValueModel:
    """See the module's docstring."""

    def __init__(self, trunk: Trunk, *, own: bool, trunk_gradient: bool) -> None:
        """
        Args:
            trunk: the policy, or a model of the critic's own.
            own: the trunk's parameters are the critic's to train.
            trunk_gradient: values have a gradient with respect to the trunk's parameters, whoever
                owns them.
        """
        self._trunk = trunk
        self._own = own
        self.trunk_gradient = trunk_gradient
        self._weight = nn.Parameter(torch.zeros(1, trunk.shape.hidden, device=trunk.device))
        self._bias = nn.Parameter(torch.zeros(1, device=trunk.device))

    def parameters(self) -> dict[str, nn.Parameter]:
        """What the critic's optimiser owns, float32, by name; the order is fixed."""
        mine = self._trunk.parameters() if self._own else {}
        return {
            f"{HEAD}weight": self._weight,
            f"{HEAD}bias": self._bias,
            **{f"{TRUNK}{name}": parameter for name, parameter in mine.items()},
        }

    def refresh(self) -> None:
        """Recompute what was derived from the critic's own parameters, after they moved."""
        if self._own:
            self._trunk.refresh()

    def features(self, ids: Tensor, layout: Layout, index: Tensor) -> Tensor:
        """Hidden states [n, hidden] that `values` reads, in the trunk's dtype.

        Args:
            ids: packed tokens [N].
            index: places [n] of the tokens after which V is asked: a value is that of what came
                before the token it belongs to, as a log-probability is.
        """
        with contextlib.nullcontext() if self.trunk_gradient else torch.no_grad():
            return self._trunk.hidden(ids, layout).index_select(0, index)

    def values(self, features: Tensor) -> Tensor:
        """V [n], float32, with gradient."""
        return (nn.functional.normalize(features.float()) @ self._weight.T)[:, 0] + self._bias

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of the parameters by name, on the CPU."""
        return {
            name: p.detach().to("cpu", copy=True).contiguous()
            for name, p in self.parameters().items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """The inverse of `state_dict`; refreshes.

        Raises:
            WeightsError: a tensor is missing, unknown or of another shape; nothing is changed.
        """
        parameters = self.parameters()
        shapes = {name: tuple(p.shape) for name, p in parameters.items()}
        found = {name: tuple(tensor.shape) for name, tensor in state.items()}
        if differ := sorted(set(shapes.items()) ^ set(found.items())):
            name = differ[0][0]
            raise WeightsError(
                f"the critic of the checkpoint has {len(found)} tensors, the run's {len(shapes)}; "
                f"{name} is {found.get(name, 'missing')} there and {shapes.get(name, 'unknown')} "
                "here",
                hint="resume with the learn.critic and the model of the run that saved it",
            )
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(state[name])
        self.refresh()
