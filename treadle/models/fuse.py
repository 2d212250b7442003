"""Exact, cheaper forms of the parts that most decoders share.

`fuse` swaps a module's forward for one of ours only after both gave the same numbers on random
parameters and inputs; what does not match (another norm, partial rotary, a third projection) keeps
the library's forward. Guarantees: in fp32 a swapped part agrees with the library's to TOLERANCE;
in bf16 it computes in fp32 and rounds once, at its end.

What pays on a CPU: one product for query, key and value and one for gate and up; norm, rotary
and SwiGLU as single nodes of the graph, whose backward makes a third of the passes over memory.

Takes: an installed module. Gives: the linears that are now asked together.
"""

# autograd.Function takes any number of arguments; ours have names.
# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers import PreTrainedModel

from treadle.errors import ModelError
from treadle.models import forward
from treadle.models.linear import PlainWeights

CHUNK = 1 << 18
"""Elements that a chain of elementwise passes takes at a time: 1 MiB in fp32."""
TOLERANCE = 1e-5
"""Largest relative difference in fp32 at which a swapped part counts as the same."""


# --------------------------------------------------------------------------- arithmetic


def _chunks(rows: int, width: int, device: torch.device) -> Iterator[slice]:
    """Runs of rows that fit a core's cache: a chain of passes then reads memory once."""
    step = max(1, CHUNK // width) if device.type == "cpu" else max(1, rows)
    return (slice(start, start + step) for start in range(0, rows, step))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps) over the last dimension, in the weight's dtype.

    Statistics are fp32; x may be fp32 where the weight is not.
    """
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _RmsNorm.apply(x, weight, eps)  # pyright: ignore[reportReturnType]
    return _normalise(x, weight, eps)[0]


def _normalise(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    y = torch.empty(x.shape, dtype=weight.dtype, device=x.device)
    rows, out = x.flatten(0, -2), y.view(-1, x.shape[-1])
    inverse = torch.empty(rows.shape[0], 1, device=x.device)
    factor = weight.float()
    for part in _chunks(rows.shape[0], rows.shape[1], x.device):
        wide = rows[part].float()
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        r = inverse[part].copy_(norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_())
        # The library rounds before it multiplies by the weight, too; once is enough.
        out[part].copy_((wide * r).mul_(factor))
    return y, inverse


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, inverse = _normalise(x, weight, eps)
        ctx.save_for_backward(x, weight, inverse)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        d_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        d_weight = torch.zeros(weight.shape, device=x.device) if ctx.needs_input_grad[1] else None
        rows, d_rows, out = x.flatten(0, -2), grad.flatten(0, -2), d_x.view(-1, x.shape[-1])
        for part in _chunks(rows.shape[0], rows.shape[1], x.device):
            wide, r = rows[part].float(), inverse[part]
            if d_weight is not None:
                d_weight += (d_rows[part].float() * wide * r).sum(0)
            # d_x = r * (d - x * r^2 * mean(d * x)), d the gradient of the normalised rows.
            d = (d_rows[part] * weight).float()
            mean = torch.linalg.vecdot(d, wide).unsqueeze(-1).div_(-x.shape[-1])
            out[part] = d.addcmul_(wide, mean.mul_(r).mul_(r)).mul_(r)
        return d_x, None if d_weight is None else d_weight.to(weight.dtype), None


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    if torch.is_grad_enabled() and gate.requires_grad:
        return _SwiGlu.apply(gate, up)  # pyright: ignore[reportReturnType]
    return _gated(gate, up)


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    gates, ups, out = gate.flatten(0, -2), up.flatten(0, -2), y.view(-1, gate.shape[-1])
    for part in _chunks(gates.shape[0], gates.shape[1], gate.device):
        out[part].copy_(F.silu(gates[part].float()).mul_(ups[part].float()))
    return y


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _gated(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        width = gate.shape[-1]
        # One buffer, so that the product before it needs no copy to take both.
        both = torch.empty((*gate.shape[:-1], 2 * width), dtype=gate.dtype, device=gate.device)
        d_gates, d_ups = both.view(-1, 2 * width).split(width, dim=-1)
        gates, ups, grads = (t.flatten(0, -2) for t in (gate, up, grad))
        for part in _chunks(gates.shape[0], gates.shape[1], gate.device):
            g, d_gate, d_up = gates[part], d_gates[part], d_ups[part]
            torch.ops.aten.silu_backward.grad_input(grads[part] * ups[part], g, grad_input=d_gate)
            torch.ops.aten.silu.out(g, out=d_up).mul_(grads[part])
        return both.split(width, dim=-1)  # pyright: ignore[reportReturnType]


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of halves: x * cos + rotate_half(x) * sin.

    Args:
        x: [B, T, H, D].
        cos, sin: [B, T, D] or [1, T, D].

    Returns:
        [B, T, H, D], contiguous.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        return _Rope.apply(x, cos, sin)  # pyright: ignore[reportReturnType]
    return _rotate(x, cos, sin, 1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """sign 1: the rotation; sign -1: its transpose."""
    half = x.shape[-1] // 2
    cos, sin = cos.unsqueeze(-2).float(), sin.unsqueeze(-2).float()
    left, right = sin[..., :half], sin[..., half:]
    if sign < 0:
        left, right = right, left
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for part in _chunks(x.shape[1], x.shape[0] * x.shape[2] * x.shape[3], x.device):
        given = x[:, part].float()
        y = given * cos[:, part]
        y[..., :half].addcmul_(given[..., half:], left[:, part], value=-sign)
        y[..., half:].addcmul_(given[..., :half], right[:, part], value=sign)
        out[:, part].copy_(y)
    return out


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, sin, -1), None, None


# --------------------------------------------------------------------------- swapped forwards


class _Norm(nn.Module):
    def forward(self, hidden_states: Tensor) -> Tensor:
        if forward.current() is None:
            return super().forward(hidden_states)
        return rms_norm(hidden_states, self.weight, self.treadle_eps)  # pyright: ignore


class _Mlp(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        weights = forward.current()
        if weights is None:
            return super().forward(x)
        names: tuple[str, ...] = self.__dict__["treadle_names"]
        gate, up = weights.linears(names[:2], x)
        return weights.linear(names[2], swiglu(gate, up))


class _Attention(nn.Module):
    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        weights = forward.current()
        if weights is None or position_embeddings is None:
            return super().forward(hidden_states, position_embeddings, *args, **kwargs)
        fields = self.__dict__
        names: tuple[str, ...] = fields["treadle_names"]
        parts = weights.linears(names[:3], hidden_states)
        lead = hidden_states.shape[:-1]
        q, k, v = (part.view(*lead, -1, fields["head_dim"]) for part in parts)
        modules = fields["_modules"]
        if "q_norm" in modules:
            q, k = modules["q_norm"](q), modules["k_norm"](k)
        cos, sin = (table.to(q.dtype) for table in position_embeddings)
        q, k = rope(q, cos, sin), rope(k, cos, sin)
        out = forward.attend(
            fields["layer_idx"],
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            fields["scaling"],
            fields["treadle_window"],
        )
        return weights.linear(names[3], out.reshape(*lead, -1)), None


@cache
def _swapped(mixin: type[nn.Module], cls: type[nn.Module]) -> type[nn.Module]:
    return type(cls.__name__, (mixin, cls), {"__module__": cls.__module__})


# --------------------------------------------------------------------------- trying a swap


def fuse(module: PreTrainedModel) -> tuple[tuple[str, ...], ...]:
    """Swap what can be swapped, in place; idempotent.

    Args:
        module: a causal LM after `forward.install`.

    Returns:
        Names of the linears that the module now asks together.
    """
    together: list[tuple[str, ...]] = []
    for name, m in module.named_modules():
        children = {child for child, _ in m.named_children()}
        if isinstance(m, (_Norm, _Mlp, _Attention)):
            swapped = True
        elif not children:
            swapped = _try_norm(name, m)
        else:
            swapped = _try_mlp(name, m, children) or _try_attention(name, m, children)
        if swapped and children:
            names: tuple[str, ...] = m.__dict__["treadle_names"]
            together.append(names[:-1])
    return tuple(together)


def _try_norm(name: str, m: nn.Module) -> bool:
    eps = getattr(m, "variance_epsilon", getattr(m, "eps", None))
    parameters = dict(m.named_parameters())
    if not isinstance(eps, float) or set(parameters) != {"weight"}:
        return False
    m.__dict__["treadle_eps"] = eps
    return _try(name, m, _Norm, lambda: {"x": torch.randn(2, 3, *parameters["weight"].shape)})


def _try_mlp(name: str, m: nn.Module, children: set[str]) -> bool:
    linears = ("gate_proj", "up_proj", "down_proj")
    if not children >= set(linears) or not _all_linear(m, linears):
        return False
    if len(set(children) - set(linears)) > 1:
        return False
    m.__dict__["treadle_names"] = tuple(f"{name}.{linear}" for linear in linears)
    width: int = m.gate_proj.in_features  # pyright: ignore
    return _try(name, m, _Mlp, lambda: {"x": torch.randn(2, 3, width)})


def _try_attention(name: str, m: nn.Module, children: set[str]) -> bool:
    linears = ("q_proj", "k_proj", "v_proj", "o_proj")
    if not children >= set(linears) or not _all_linear(m, linears):
        return False
    if not all(hasattr(m, field) for field in ("head_dim", "layer_idx", "scaling")):
        return False
    m.__dict__["treadle_names"] = tuple(f"{name}.{linear}" for linear in linears)
    width: int = m.q_proj.in_features  # pyright: ignore

    def inputs() -> dict[str, Any]:
        angle = torch.randn(2, 3, int(m.head_dim) // 2).repeat(1, 1, 2)  # pyright: ignore
        return {
            "hidden_states": torch.randn(2, 3, width),
            "position_embeddings": (angle.cos(), angle.sin()),
            "attention_mask": None,
        }

    return _try(name, m, _Attention, inputs)


def _all_linear(m: nn.Module, names: tuple[str, ...]) -> bool:
    return all(isinstance(getattr(m, name), forward.AskingLinear) for name in names)


def _try(
    name: str, m: nn.Module, mixin: type[nn.Module], inputs: Callable[[], dict[str, Any]]
) -> bool:
    """Swap, and swap back unless library and swap agree on random parameters and inputs."""
    original = m.__class__
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        tensors = {
            f"{name}.{key}": torch.randn(p.shape) * p.shape[-1] ** -0.5
            for key, p in m.named_parameters()
        }
        given = inputs()
        args = [given.pop("x")] if "x" in given else []
        weights = PlainWeights(tensors)
        try:
            want, window = forward.call(m, args, given, _plain_attention, weights)
            m.__dict__["treadle_window"] = window
            m.__class__ = _swapped(mixin, original)
            got, _ = forward.call(m, args, given, _plain_attention, weights)
        except (TypeError, ValueError, RuntimeError, ModelError):
            # It takes other inputs than this family's: not ours to swap.
            m.__class__ = original
            return False
    if isinstance(want, tuple):
        want, got = want[0], got[0]
    same = want.shape == got.shape and bool(
        (want - got).abs().max() <= TOLERANCE * want.abs().max()
    )
    if not same:
        m.__class__ = original
        return False
    return True


def _plain_attention(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=scale, enable_gqa=True
    ).transpose(1, 2)
