"""Linear layers of a forward: plain tensors for inference, merged LoRA or full for training.

Guarantees:
- forward and input gradient use one merged weight W' = W + s B A in the compute dtype, so
  training, sampling and an export compute the same function;
- gradients are returned in the dtype of the masters (fp32), where autograd accumulates them
  over micro-batches; a frozen weight gets none;
- linears of one input (query, key, value; gate, up) are one product when they are asked as such.

Takes: named tensors. Gives: implementations of `forward.Weights`.
"""

# autograd.Function takes any number of arguments; ours have names.
# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class Fused:
    """Merged weights of linears that share their input, stacked; immutable once built."""

    names: tuple[str, ...]
    weight: Tensor
    """[sum of out, in], compute dtype."""
    bias: Tensor | None
    """[sum of out] or None."""
    sizes: tuple[int, ...]
    """Output features of each name."""

    def bounds(self) -> tuple[tuple[int, int], ...]:
        """First and past-last row of each name."""
        return tuple(pairwise(accumulate(self.sizes, initial=0)))


@dataclass(frozen=True, slots=True)
class LoraPair:
    """fp32 masters of one adapter: y += scale * (x A^T) B^T."""

    a: Tensor
    """[rank, in]."""
    b: Tensor
    """[out, rank]."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter by itself; nothing overwrites its tensors."""

    pairs: Mapping[str, LoraPair]
    """By the name of their linear."""
    scale: float
    """alpha / rank."""


class PlainWeights:
    """Named tensors, computed as they are. An engine may override `linear` and `linears`.

    `tensors` holds "<linear>.weight", "<linear>.bias" where there is one, and every other
    parameter under its own name, all in the compute dtype. `fused` holds the linears that are
    asked together; their tensors may be slices of it.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], fused: Mapping[tuple[str, ...], Fused] | None = None
    ) -> None:
        self.tensors = tensors
        self.fused = fused or {}

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def linears(self, names: tuple[str, ...], x: Tensor) -> tuple[Tensor, ...]:
        fused = self.fused.get(names)
        if fused is None:
            return tuple(self.linear(name, x) for name in names)
        return F.linear(x, fused.weight, fused.bias).split(fused.sizes, dim=-1)

    def embedding(self, name: str, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.tensors[f"{name}.weight"])

    def parameter(self, name: str) -> Tensor:
        return self.tensors[name]


class CastWeights:
    """The module's own fp32 parameters, cast when they are used: the model without its adapter,
    or with another one, merged when it is used."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype,
        pairs: Mapping[str, LoraPair] | None = None,
        scale: float = 0.0,
    ) -> None:
        self._tensors = tensors
        self._dtype = dtype
        self._merged = {f"{name}.weight": pair for name, pair in (pairs or {}).items()}
        self._scale = scale

    def linear(self, name: str, x: Tensor) -> Tensor:
        bias = self._tensors.get(f"{name}.bias")
        bias = None if bias is None else bias.to(self._dtype)
        return F.linear(x, self.parameter(f"{name}.weight"), bias)

    def linears(self, names: tuple[str, ...], x: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.linear(name, x) for name in names)

    def embedding(self, name: str, ids: Tensor) -> Tensor:
        return F.embedding(ids, self._tensors[f"{name}.weight"]).to(self._dtype)

    def parameter(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        if (pair := self._merged.get(name)) is not None:
            tensor = torch.addmm(tensor, pair.b, pair.a, alpha=self._scale)
        return tensor.to(self._dtype)


# --------------------------------------------------------------------------- training


class LoraWeights(PlainWeights):
    """Merged weights whose linears give gradients to the masters of their adapters."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        fused: Mapping[tuple[str, ...], Fused],
        pairs: Mapping[str, LoraPair],
        scale: float,
    ) -> None:
        super().__init__(tensors, fused)
        self._pairs = pairs
        self._scale = scale
        self._compute = {names: _stack(f, pairs, scale) for names, f in fused.items()}

    def linear(self, name: str, x: Tensor) -> Tensor:
        return self.linears((name,), x)[0]

    def linears(self, names: tuple[str, ...], x: Tensor) -> tuple[Tensor, ...]:
        fused = self.fused.get(names)
        if fused is None:
            return tuple(self.linear(name, x) for name in names)
        if not torch.is_grad_enabled():
            return F.linear(x, fused.weight, fused.bias).split(fused.sizes, dim=-1)
        masters = [t for n in names for t in (self._pairs[n].a, self._pairs[n].b)]
        a, b = self._compute[names]
        return _LoraLinear.apply(x, fused, a, b, self._scale, *masters)  # pyright: ignore


def _stack(fused: Fused, pairs: Mapping[str, LoraPair], scale: float) -> tuple[Tensor, Tensor]:
    """A of all names stacked [n * rank, in], and scale * B as a block diagonal [out, n * rank]."""
    a = torch.cat([pairs[n].a.detach() for n in fused.names])
    b = torch.block_diag(*(pairs[n].b.detach() * scale for n in fused.names))
    return a.to(fused.weight.dtype), b.to(fused.weight.dtype)


class _LoraLinear(torch.autograd.Function):
    """y = x W'^T + bias; with g = s dY B and t = x A^T: dX = dY W', dA = g^T x, dB = s dY^T t."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, fused: Fused, a: Tensor, b: Tensor, scale: float, *masters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x)
        ctx.fused, ctx.a, ctx.b, ctx.scale = fused, a, b, scale
        return F.linear(x, fused.weight, fused.bias).split(fused.sizes, dim=-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        fused: Fused = ctx.fused
        dy = _rows(join_columns(grads))
        dx = torch.mm(dy, fused.weight).view_as(x) if ctx.needs_input_grad[0] else None
        rows = _rows(x)
        # The skinny products read dY and x once for all names; with the few rows on the left,
        # contiguous, they take half the time of dY^T t.
        da = torch.mm(torch.mm(dy, ctx.b).t().contiguous(), rows)
        db = torch.mm(torch.mm(rows, ctx.a.t()).t().contiguous(), dy)
        rank = da.shape[0] // len(fused.names)
        out: list[Tensor | None] = [dx, None, None, None, None]
        for i, (start, stop) in enumerate(fused.bounds()):
            ranks = slice(i * rank, (i + 1) * rank)
            out += [da[ranks].float(), db[ranks, start:stop].t().float().mul_(ctx.scale)]
        return tuple(out)


class FullWeights(PlainWeights):
    """Compute copies whose use gives gradients to the fp32 masters of the same names."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        fused: Mapping[tuple[str, ...], Fused],
        masters: Mapping[str, Tensor],
    ) -> None:
        super().__init__(tensors, fused)
        self._masters = masters

    def linear(self, name: str, x: Tensor) -> Tensor:
        return self.linears((name,), x)[0]

    def linears(self, names: tuple[str, ...], x: Tensor) -> tuple[Tensor, ...]:
        fused = self.fused.get(names)
        if fused is None:
            return tuple(self.linear(name, x) for name in names)
        weights = [self._masters[f"{n}.weight"] for n in names]
        biases = [self._masters[f"{n}.bias"] for n in names if f"{n}.bias" in self._masters]
        return _FullLinear.apply(x, fused, len(biases), *weights, *biases)  # pyright: ignore

    def embedding(self, name: str, ids: Tensor) -> Tensor:
        key = f"{name}.weight"
        return _FullEmbedding.apply(self._masters[key], self.tensors[key], ids)  # pyright: ignore

    def parameter(self, name: str) -> Tensor:
        return _Copy.apply(self._masters[name], (self.tensors[name],))  # pyright: ignore


class _FullLinear(torch.autograd.Function):
    """A linear whose compute copies stand for fp32 masters: dW and db go to the masters."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, fused: Fused, num_biases: int, *masters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x)
        ctx.fused, ctx.num_biases = fused, num_biases
        return F.linear(x, fused.weight, fused.bias).split(fused.sizes, dim=-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        fused: Fused = ctx.fused
        dy = _rows(join_columns(grads))
        dx = torch.mm(dy, fused.weight).view_as(x) if ctx.needs_input_grad[0] else None
        dw = torch.mm(dy.t(), _rows(x))
        out: list[Tensor | None] = [dx, None, None]
        out += [dw[start:stop].float() for start, stop in fused.bounds()]
        if ctx.num_biases:
            db = dy.sum(0, dtype=torch.float32)
            out += [db[start:stop] for start, stop in fused.bounds()]
        return tuple(out)


class _FullEmbedding(torch.autograd.Function):
    """Rows of a table; the gradient of a frequent token is summed in fp32, not in bf16."""

    @staticmethod
    def forward(ctx: Any, master: Tensor, table: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.shape = master.shape
        return F.embedding(ids, table)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        total = torch.zeros(ctx.shape, dtype=torch.float32, device=grad.device)
        return total.index_add_(0, ids.flatten(), _rows(grad).float()), None, None


class _Copy(torch.autograd.Function):
    """A parameter's compute copy in the forward, its fp32 master in the backward."""

    @staticmethod
    def forward(ctx: Any, master: Tensor, copy: tuple[Tensor]) -> Tensor:
        # A new tensor object: autograd attaches this graph to what is returned.
        return copy[0].detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.float(), None


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def join_columns(parts: Sequence[Tensor]) -> Tensor:
    """cat(parts, -1), without a copy where the parts are neighbouring columns of one buffer."""
    first = parts[0]
    if len(parts) == 1:
        return first
    offset, width = first.storage_offset(), sum(p.shape[-1] for p in parts)
    for part in parts:
        if (
            part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
            or part.stride() != first.stride()
            or part.storage_offset() != offset
        ):
            return torch.cat(list(parts), dim=-1)
        offset += part.shape[-1]
    if first.stride(-1) != 1 or first.stride(-2) < width:
        return torch.cat(list(parts), dim=-1)
    return first.as_strided((*first.shape[:-1], width), first.stride(), first.storage_offset())
