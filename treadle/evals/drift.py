"""What training did to a model: how far it moved, in its answers and in its weights.

    divergence(a, b, rows)      KL(a || b) where a sampled: exact per token, and the k3 estimate
    weight_change(start, end)   norm, rank and share of the change, by kind of layer
    drift_of(...)               a task set: both divergences, and accuracy before and after

Guarantees: an exact KL is over the full vocabulary in float32 at the sampling temperature, of every
token that was sampled; both policies see the same ids; weights are compared in float32 with
adapters merged; nothing is trained or stored.

Takes: two policies of one base, groups of answers. Gives: numbers (docs/metrics.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from treadle.batch import MicroBatch, pack, samples
from treadle.errors import ContractError
from treadle.evals.statistics import Estimate, Scores, paired_gain, rate
from treadle.models.head import logits
from treadle.models.policy import Policy
from treadle.types import Group, Sample

CHUNK = 256
"""Positions whose full distributions are held at once."""

MICRO_TOKENS = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Divergence:
    """KL(a || b) at what a sampled, nats; None where nothing was sampled."""

    kl_nats: float | None
    """Mean over tokens of the exact KL of the two next-token distributions; >= 0."""
    k3_nats: float | None
    """Mean over tokens of r - 1 - log r, r = b / a at the sampled token; >= 0."""
    row_nats: float | None
    """Mean over answers of the sum of the exact KLs."""
    num_tokens: int
    num_rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class KindChange:
    """What became of all weights of one kind, e.g. "self_attn.q_proj"."""

    kind: str
    tensors: int
    parameters: int
    norm: float
    """Frobenius norm of the change of all of them."""
    relative_norm: float
    """The same over the norm of the weights at the start; 0 where that is 0."""
    effective_rank: float | None
    """Mean over changed matrices of exp(entropy of the singular values of the change, normalised
    to sum 1), from 1 to the smaller side; None where no matrix changed."""
    full_rank: float | None
    """Mean smaller side of these matrices: what the effective rank could be."""
    changed_frac: float
    """Share of the weights that differ once both are rounded to bfloat16."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TasksetDrift:
    taskset: str
    trained: bool
    """The run was trained on it; otherwise it was never touched."""
    questions: int
    to_start: Divergence
    """KL(end || start), at what the end sampled."""
    from_start: Divergence
    """KL(start || end), at what the start sampled: what predicts forgetting."""
    before: Estimate
    after: Estimate
    gain: Estimate


def drift_of(
    taskset: str,
    start: Policy,
    end: Policy,
    before: Sequence[Group],
    after: Sequence[Group],
    *,
    trained: bool,
) -> TasksetDrift:
    """One task set.

    Args:
        before, after: the same tasks, answered and judged by `start` and by `end`.
    """
    scores = [_scores(groups) for groups in (before, after)]
    return TasksetDrift(
        taskset=taskset,
        trained=trained,
        questions=len(before),
        to_start=divergence(end, start, _rows(after)),
        from_start=divergence(start, end, _rows(before)),
        before=rate(scores[0]),
        after=rate(scores[1]),
        gain=paired_gain(*scores),
    )


@torch.no_grad()
def divergence(a: Policy, b: Policy, rows: Sequence[Sample]) -> Divergence:
    """KL(a || b) over the trained tokens of rows that a sampled.

    Raises:
        ContractError: the vocabularies differ.
    """
    if a.shape.vocab != b.shape.vocab:
        raise ContractError(f"vocabularies of {a.shape.vocab} and {b.shape.vocab} ids")
    exact, k3 = 0.0, 0.0
    num_tokens = 0
    for micro in pack(rows, micro_tokens=MICRO_TOKENS) if rows else []:
        kls, estimates = _micro(a, b, micro)
        exact, k3 = exact + kls, k3 + estimates
        num_tokens += micro.num_trained
    if num_tokens == 0:
        return Divergence(kl_nats=None, k3_nats=None, row_nats=None, num_tokens=0, num_rows=0)
    return Divergence(
        kl_nats=exact / num_tokens,
        k3_nats=k3 / num_tokens,
        row_nats=exact / len(rows),
        num_tokens=num_tokens,
        num_rows=len(rows),
    )


def _micro(a: Policy, b: Policy, micro: MicroBatch) -> tuple[float, float]:
    """Sums over the micro-batch of the exact KL and of k3."""
    ids = torch.tensor(micro.ids, device=a.device)
    index = torch.tensor(micro.index, device=a.device)
    targets = torch.tensor(micro.targets, device=a.device)[:, None]
    temperature = torch.tensor(micro.temperature, device=a.device)[:, None]
    hidden = [p.hidden(ids, micro.layout).index_select(0, index) for p in (a, b)]
    heads = [(p.snapshot().head, p.head.scale) for p in (a, b)]
    exact, k3 = 0.0, 0.0
    for at in range(0, len(targets), CHUNK):
        part = slice(at, at + CHUNK)
        logp, logq = (
            (logits(h[part], head) * (scale / temperature[part])).log_softmax(-1)
            for h, (head, scale) in zip(hidden, heads, strict=True)
        )
        exact += float((logp.exp() * (logp - logq)).sum(-1).clamp(min=0).double().sum())
        lr = (logq - logp).gather(1, targets[part])[:, 0].double()
        k3 += float((lr.exp() - 1 - lr).sum())
    return exact, k3


@torch.no_grad()
def weight_change(start: Policy, end: Policy) -> list[KindChange]:
    """By kind of layer, the largest relative norm first, and then "all".

    Raises:
        ContractError: the two do not have the same weights by name and shape.
    """
    weights = dict(start.module.named_parameters())
    theirs = dict(end.module.named_parameters())
    if {n: p.shape for n, p in weights.items()} != {n: p.shape for n, p in theirs.items()}:
        raise ContractError(
            "start and end of the run do not have the same weights by name and shape"
        )
    found: dict[str, list[_Change]] = {}
    for name, weight in weights.items():
        linear = name.removesuffix(".weight")
        moved = end.merged(linear) if linear in end.pairs else theirs[name].detach()
        change = _change(weight.detach().float(), moved.float(), end, linear)
        found.setdefault(kind_of(name), []).append(change)
    kinds = [_kind(kind, changes) for kind, changes in found.items()]
    kinds.sort(key=lambda k: -k.relative_norm)
    return [*kinds, _kind("all", [c for changes in found.values() for c in changes])]


def kind_of(name: str) -> str:
    """What is left of a parameter's name without the numbers of layers: where it is in a layer."""
    parts = name.removesuffix(".weight").split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[numbers[-1] + 1 :] if numbers else parts[-1:])


@dataclass(frozen=True, slots=True)
class _Change:
    parameters: int
    square: float
    """Of the norm of the change."""
    weight_square: float
    changed: int
    rank: float | None
    full: int


def _change(before: Tensor, after: Tensor, end: Policy, linear: str) -> _Change:
    delta = after - before
    square = float(delta.double().square().sum())
    rank = None
    if delta.dim() == 2 and square > 0:
        rank = effective_rank(_singular_values(delta, end, linear))
    return _Change(
        parameters=before.numel(),
        square=square,
        weight_square=float(before.double().square().sum()),
        changed=int((before.bfloat16() != after.bfloat16()).sum()),
        rank=rank,
        full=min(delta.shape) if delta.dim() == 2 else 0,
    )


def _singular_values(delta: Tensor, end: Policy, linear: str) -> Tensor:
    """Of the change; where an adapter made it, from its two factors, which is exact and cheap."""
    pair = end.pairs.get(linear)
    if pair is None:
        return torch.linalg.svdvals(delta)
    # B A = (Q_b R_b) (Q_a R_a)^T: the values are those of R_b R_a^T.
    r_b = torch.linalg.qr(pair.b.detach().float(), mode="r").R
    r_a = torch.linalg.qr(pair.a.detach().float().T, mode="r").R
    return torch.linalg.svdvals(r_b @ r_a.T)


def effective_rank(singular_values: Tensor) -> float:
    r"""$\exp(-\sum_i p_i \log p_i)$ with $p_i = \sigma_i / \sum_j \sigma_j$.

    Source: Roy and Vetterli, The effective rank (EUSIPCO 2007).
    """
    p = singular_values.double() / singular_values.double().sum()
    p = p[p > 0]
    return math.exp(-float((p * p.log()).sum()))


def _kind(kind: str, changes: Sequence[_Change]) -> KindChange:
    norm = math.sqrt(math.fsum(c.square for c in changes))
    weight = math.sqrt(math.fsum(c.weight_square for c in changes))
    total = sum(c.parameters for c in changes)
    matrices = [(c.rank, c.full) for c in changes if c.rank is not None]
    return KindChange(
        kind=kind,
        tensors=len(changes),
        parameters=total,
        norm=norm,
        relative_norm=norm / weight if weight else 0.0,
        effective_rank=sum(r for r, _ in matrices) / len(matrices) if matrices else None,
        full_rank=sum(f for _, f in matrices) / len(matrices) if matrices else None,
        changed_frac=sum(c.changed for c in changes) / total,
    )


def _rows(groups: Sequence[Group]) -> list[Sample]:
    nothing: Mapping[str, float] = {t.id: 0.0 for g in groups for t in g.scored}
    return samples(groups, nothing)


def _scores(groups: Sequence[Group]) -> Scores:
    return {g.task.id: [t.reward.value for t in g.trajectories] for g in groups}
