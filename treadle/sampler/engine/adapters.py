"""Several adapters in one pass: a shared base product, and each adapter's low-rank product.

Guarantees: tokens without an adapter are computed by the served weights as if they were alone;
an adapter's tokens get x W + s (x A) B with the W below all adapters, computed once for all of
them. That is the merged weight's function up to rounding: about 1e-5 nats in fp32; in bf16 W'
is rounded when it is merged, and here the two products are.

Takes: adapters, and which tokens are whose. Gives: a `forward.Weights` for one pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from treadle.errors import WeightsError
from treadle.models.linear import Adapter, PlainWeights


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive tokens of a pass that belong to one adapter; "" = to none."""

    adapter: str
    start: int
    stop: int


class LoadedAdapter:
    """An adapter in the compute dtype, with its scale in B."""

    def __init__(self, adapter: Adapter, dtype: torch.dtype, device: torch.device) -> None:
        self._a = {n: p.a.detach().to(device, dtype) for n, p in adapter.pairs.items()}
        self._b = {
            n: (p.b.detach() * adapter.scale).to(device, dtype) for n, p in adapter.pairs.items()
        }
        self._stacked: dict[tuple[str, ...], tuple[tuple[str, ...], Tensor, list[int]]] = {}

    def add(self, names: tuple[str, ...], x: Tensor, outputs: Sequence[Tensor]) -> None:
        """Add to the outputs of each linear, in place."""
        known, a, ranks = self._stack(names)
        if not known:
            return
        inner = torch.matmul(x, a.t()).split(ranks, dim=-1)
        for name, low in zip(known, inner, strict=True):
            outputs[names.index(name)].add_(torch.matmul(low, self._b[name].t()))

    def _stack(self, names: tuple[str, ...]) -> tuple[tuple[str, ...], Tensor, list[int]]:
        """A of those of the linears that are adapted, as one product."""
        if names not in self._stacked:
            known = tuple(n for n in names if n in self._a)
            a = torch.cat([self._a[n] for n in known]) if known else torch.empty(0)
            self._stacked[names] = known, a, [self._a[n].shape[0] for n in known]
        return self._stacked[names]


class GroupedWeights:
    """`forward.Weights` of a pass of several adapters; tokens without one come first."""

    def __init__(
        self,
        served: PlainWeights,
        base: PlainWeights,
        adapters: Mapping[str, LoadedAdapter],
        runs: Sequence[Run],
    ) -> None:
        self._served = served
        self._base = base
        self._runs = [(adapters[run.adapter], run) for run in runs if run.adapter]
        self._plain = self._runs[0][1].start if self._runs else runs[-1].stop

    def linear(self, name: str, x: Tensor) -> Tensor:
        return self.linears((name,), x)[0]

    def linears(self, names: tuple[str, ...], x: Tensor) -> tuple[Tensor, ...]:
        parts: list[tuple[Tensor, ...]] = []
        if self._plain:
            parts.append(self._served.linears(names, x[..., : self._plain, :]))
        if self._runs:
            outputs = self._base.linears(names, x[..., self._plain :, :])
            for adapter, run in self._runs:
                rows = slice(run.start - self._plain, run.stop - self._plain)
                adapter.add(
                    names, x[..., run.start : run.stop, :], [y[..., rows, :] for y in outputs]
                )
            parts.append(outputs)
        if len(parts) == 1:
            return parts[0]
        return tuple(torch.cat(columns, dim=-2) for columns in zip(*parts, strict=True))

    def embedding(self, name: str, ids: Tensor) -> Tensor:
        return self._served.embedding(name, ids)

    def parameter(self, name: str) -> Tensor:
        return self._served.parameter(name)


def check(adapter: Adapter, shapes: Mapping[str, tuple[int, int]], name: str) -> None:
    """Raises WeightsError: a linear is unknown, a pair does not fit, or a value is not finite.

    Args:
        shapes: (out, in) of every linear that may be adapted.
    """
    if not adapter.pairs:
        raise WeightsError(f"adapter `{name}` adapts nothing")
    for linear, pair in adapter.pairs.items():
        if linear not in shapes:
            raise WeightsError(f"adapter `{name}` adapts `{linear}`, which the model does not have")
        out, inputs = shapes[linear]
        rank = pair.a.shape[0]
        if tuple(pair.a.shape) != (rank, inputs) or tuple(pair.b.shape) != (out, rank):
            raise WeightsError(
                f"adapter `{name}`, `{linear}`: A {tuple(pair.a.shape)} and B "
                f"{tuple(pair.b.shape)} do not fit a linear of {out} x {inputs}"
            )
        for part, tensor in (("A", pair.a), ("B", pair.b)):
            if not bool(torch.isfinite(tensor).all()):
                raise WeightsError(f"adapter `{name}`, `{linear}`: {part} is not finite")
