"""The output head: token logprobs and entropies from hidden states, without keeping logits.

Guarantees:
- logits have fp32 precision also where the operands are bf16 (`logits`), the log-softmax is taken
  in fp32, and no logprob is above 0;
- rows are scored at their own temperature: logits are divided by it, never logprobs;
- at most CHUNK rows of logits exist at a time. The gradient of a logprob with respect to its
  hidden state, (W[target] - p W) / T, is made in the same chunk and kept: [n, hidden], so that
  backward is one multiplication;
- entropy carries a gradient only where it is asked for: dH/dz = -p (log p + H), made in the same
  chunk as the other and kept as [n, hidden] too.

Takes: hidden states and the head's weight. Gives: logprobs and entropies in nats.
"""

# autograd.Function takes any number of arguments; ours have names.
# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from treadle.errors import ModelError

CHUNK = 512
"""Rows of logits at a time: twice 50 MB of bf16 at a vocabulary of 49,152."""
SLICE = 16
"""Rows of logits that the elementwise passes take at a time on a CPU: 3 MB of fp32."""


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """How a model turns hidden states into logits: logits = scale * hidden @ weight^T."""

    name: str
    """Name of the weight, e.g. "lm_head.weight"; the embedding's when they are tied."""
    tied: bool
    scale: float = 1.0


def head_spec(module: PreTrainedModel) -> HeadSpec:
    """The head of a causal LM, from its module and config.

    Raises:
        ModelError: no linear head, a head with a bias, or soft-capped logits.
    """
    head = module.get_output_embeddings()
    if head is None or not isinstance(head, torch.nn.Linear):
        raise ModelError(f"{type(module).__name__} has no linear output head")
    if head.bias is not None:
        raise ModelError(f"{type(module).__name__}: an output head with a bias is not supported")
    config = module.config.get_text_config()
    for key in ("final_logit_softcapping", "output_logit_soft_cap", "logits_soft_cap"):
        if getattr(config, key, None) is not None:
            raise ModelError(
                f"{type(module).__name__} soft-caps its logits ({key} = {getattr(config, key)}), "
                "which is not supported",
                hint="choose a model without it; gemma 3, llama and qwen have none",
            )
    names = {id(p): name for name, p in reversed(list(module.named_parameters()))}
    embedding = module.get_input_embeddings()
    tied = getattr(embedding, "weight", None) is head.weight
    scale = float(getattr(config, "logit_scale", None) or 1.0)
    if (divisor := getattr(config, "logits_scaling", None)) is not None:
        scale /= float(divisor)
    return HeadSpec(name=names[id(head.weight)], tied=tied, scale=scale)


def logits(hidden: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """hidden [n, d] @ weight [V, d]^T as fp32 [n, V].

    A bf16 product rounds a logit of 16 by up to 0.03. Where operands are bf16 the product is taken
    twice, the second time minus the first: the residual is small, hence rounded finely, and their
    sum is good to 2^-17. The two cost less than half of an fp32 product on a CPU with bf16 units.

    Args:
        out: fp32 [n, V] to write to.
    """
    if hidden.dtype == torch.float32:
        return torch.mm(hidden, weight.t(), out=out)
    rough = torch.mm(hidden, weight.t())
    residual = torch.addmm(rough, hidden, weight.t(), beta=-1)
    out = rough.float() if out is None else out.copy_(rough)
    # Added in fp32: a sum of mixed dtypes takes a slow path.
    return out.add_(residual.float())


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float | Tensor,
    *,
    scale: float = 1.0,
    master: Tensor | None = None,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    r"""log softmax(scale * h W^T / T)[target] and the entropy of that distribution.

    Args:
        hidden: [n, d], bf16 or fp32; fp64 for checks of the gradient, with all results in fp64.
        weight: head in hidden's dtype, [V, d].
        targets: token ids [n].
        temperature: > 0; a number, or one per row [n].
        scale: of the model's logits (`HeadSpec.scale`).
        master: the fp32 parameter that `weight` is a copy of, when the head itself is trained;
            its gradient is made in backward, in chunks.
        entropy_gradient: the entropies carry a gradient as well. It costs one more product of
            [n, V] with the weight, and no more rows of logits.

    Returns:
        logprobs fp32 [n] with gradient, entropies fp32 [n], without unless asked; nats.

    Raises:
        ValueError: shapes differ, a temperature is not > 0, or a target is outside of 0..V-1.
    """
    count, vocab = hidden.shape[0], weight.shape[0]
    if targets.shape != (count,):
        raise ValueError(f"expected {count} targets, got shape {tuple(targets.shape)}")
    if count and not 0 <= int(targets.min()) <= int(targets.max()) < vocab:
        raise ValueError(
            f"targets run over {int(targets.min())}..{int(targets.max())}, the vocabulary over "
            f"0..{vocab - 1}"
        )
    rows = torch.as_tensor(temperature, dtype=torch.float32, device=hidden.device)
    if rows.dim() and rows.shape != (count,):
        raise ValueError(f"expected {count} temperatures, got shape {tuple(rows.shape)}")
    if not bool((rows > 0).all()):
        raise ValueError(f"temperature must be > 0 to score tokens, got {float(rows.min())}")
    factor = (scale / rows).expand(count).to(_wide(weight.dtype))
    return _TokenLogprobs.apply(  # pyright: ignore
        hidden, master, (weight,), targets, factor, entropy_gradient
    )


def _wide(dtype: torch.dtype) -> torch.dtype:
    """In which sums over the vocabulary are taken."""
    return torch.promote_types(dtype, torch.float32)


class _Rows:
    """Logits of one chunk, handed out in fp32 a few rows at a time.

    The products want many rows, the elementwise passes want few: SLICE rows of logits stay in a
    core's cache. What `replace` writes back takes the place of the logits, for the last product;
    with `two`, `replace_second` keeps as much again, and a chunk has as many rows as fit the memory
    of one without.
    """

    def __init__(self, count: int, weight: Tensor, *, two: bool = False) -> None:
        self._weight = weight
        self._on_cpu = weight.device.type == "cpu"
        narrow = weight.dtype != _wide(weight.dtype)
        self.chunk = max(1, CHUNK // 2) if two and not narrow else CHUNK
        shape = (min(self.chunk, count), weight.shape[0])
        self._rough = torch.empty(shape, dtype=weight.dtype, device=weight.device)
        self._residual = None
        self._wide = None
        step = min(SLICE if self._on_cpu else self.chunk, shape[0])
        wide = _wide(weight.dtype)
        if narrow:
            self._residual = torch.empty_like(self._rough)
            self._wide = self._rough.new_empty((step, shape[1]), dtype=wide)
        # A row's residual is not needed any more once its logits were handed out.
        self._second = self._residual if narrow or not two else torch.empty_like(self._rough)
        self._p = self._rough.new_empty((step, shape[1]), dtype=wide)
        self._step = step

    def load(self, hidden: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Slices of the rows of `hidden` [<= CHUNK, d]: (rows, logits fp32, scratch of that shape).

        The logits may be overwritten.
        """
        count = hidden.shape[0]
        rough = self._rough[:count]
        torch.mm(hidden, self._weight.t(), out=rough)
        if self._residual is not None:
            torch.addmm(rough, hidden, self._weight.t(), beta=-1, out=self._residual[:count])
        for start in range(0, count, self._step):
            rows = slice(start, min(start + self._step, count))
            p = self._p[: rows.stop - start]
            if self._residual is None or self._wide is None:
                yield rows, rough[rows], p
            else:
                z = self._wide[: rows.stop - start].copy_(rough[rows])
                yield rows, z.add_(p.copy_(self._residual[rows])), p

    def replace(self, rows: slice, values: Tensor) -> None:
        self._rough[rows] = values

    def replaced(self, count: int) -> Tensor:
        """What `replace` wrote, [count, V] in the weight's dtype."""
        return self._rough[:count]

    def replace_second(self, rows: slice, values: Tensor) -> None:
        assert self._second is not None
        self._second[rows] = values

    def second(self, count: int) -> Tensor:
        """What `replace_second` wrote, [count, V] in the weight's dtype."""
        assert self._second is not None
        return self._second[:count]


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        master: Tensor | None,
        holder: tuple[Tensor],
        targets: Tensor,
        factor: Tensor,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        (weight,) = holder
        count = hidden.shape[0]
        logp, entropy = (factor.new_empty(count) for _ in range(2))
        unit = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        unit_entropy = torch.empty_like(hidden) if unit is not None and entropy_gradient else None
        logits_of = _Rows(count, weight, two=unit_entropy is not None)
        unscaled = bool((factor == 1.0).all())
        for start in range(0, count, logits_of.chunk):
            chunk = slice(start, start + logits_of.chunk)
            h, t, f = hidden[chunk], targets[chunk, None], factor[chunk, None]
            for rows, z, p in logits_of.load(h):
                if not unscaled:
                    z.mul_(f[rows])
                torch.softmax(z, dim=-1, out=p)
                # The largest probability is 1 / sum(exp(z - max)): this is max + log(sum).
                log_normaliser = z.amax(-1) - p.amax(-1).log_()
                chosen = z.gather(1, t[rows])[:, 0]
                logp[chunk][rows] = (chosen - log_normaliser).clamp_(max=0.0)
                entropy[chunk][rows] = (log_normaliser - z.mul_(p).sum(-1)).clamp_(min=0.0)
                if unit_entropy is not None:
                    logits_of.replace_second(
                        rows, _entropy_slope(z, p, log_normaliser, entropy[chunk][rows])
                    )
                if unit is not None:
                    # In fp32, before rounding: at p near 1 the difference is what matters.
                    p.scatter_add_(1, t[rows], p.new_full((p.shape[0], 1), -1.0))
                    logits_of.replace(rows, p)
            if unit is not None:
                torch.mm(logits_of.replaced(h.shape[0]), weight, out=unit[chunk])
                unit[chunk].mul_(-f.to(unit.dtype))
            if unit_entropy is not None:
                torch.mm(logits_of.second(h.shape[0]), weight, out=unit_entropy[chunk])
                unit_entropy[chunk].mul_(-f.to(unit_entropy.dtype))
        kept = hidden if master is not None else None
        ctx.save_for_backward(unit, unit_entropy, kept, targets, factor)
        ctx.weight = weight if master is not None else None
        ctx.entropy_gradient = entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        unit, unit_entropy, hidden, targets, factor = ctx.saved_tensors
        d_hidden = None if unit is None else unit * grad[:, None].to(unit.dtype)
        if unit_entropy is not None:
            d_hidden = d_hidden + unit_entropy * grad_entropy[:, None].to(unit_entropy.dtype)
        d_master = None
        if ctx.needs_input_grad[1]:
            slope = grad_entropy * factor if ctx.entropy_gradient else None
            d_master = _head_gradient(hidden, ctx.weight, targets, factor, grad * factor, slope)
        return d_hidden, d_master, None, None, None, None


def _entropy_slope(weighted: Tensor, p: Tensor, log_normaliser: Tensor, entropy: Tensor) -> Tensor:
    """-dH/dz = p (log p + H) of rows, in place of `weighted`, which is p z."""
    return weighted.addcmul_(p, (log_normaliser - entropy)[:, None], value=-1.0)


def _head_gradient(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    factor: Tensor,
    grad: Tensor,
    grad_entropy: Tensor | None,
) -> Tensor:
    """sum over rows of [grad * (onehot(target) - p) + grad_entropy * dH/dz]^T h, fp32 [V, d];
    logits are made again."""
    total = torch.zeros(weight.shape, dtype=factor.dtype, device=weight.device)
    logits_of = _Rows(hidden.shape[0], weight)
    for start in range(0, hidden.shape[0], CHUNK):
        chunk = slice(start, start + CHUNK)
        h, t, f, g = hidden[chunk], targets[chunk, None], factor[chunk, None], grad[chunk, None]
        for rows, z, p in logits_of.load(h):
            torch.softmax(z.mul_(f[rows]), dim=-1, out=p)
            if grad_entropy is not None:
                log_normaliser = z.amax(-1) - p.amax(-1).log_()
                entropy = (log_normaliser - z.mul_(p).sum(-1)).clamp_(min=0.0)
                slope = _entropy_slope(z, p, log_normaliser, entropy)
                slope.mul_(-grad_entropy[chunk][rows, None])
                p.scatter_add_(1, t[rows], p.new_full((p.shape[0], 1), -1.0))
                logits_of.replace(rows, p.mul_(-g[rows]).add_(slope))
            else:
                p.scatter_add_(1, t[rows], p.new_full((p.shape[0], 1), -1.0))
                logits_of.replace(rows, p.mul_(-g[rows]))
        total += torch.mm(logits_of.replaced(h.shape[0]).t(), h)
    return total
