"""Ranks of a training step: what a process computes of it, and what all of them know together.

    every rank        is given the whole step, and packs it as the others do
    own(n)            computes micro-batches rank, rank + world, ... of n
    gathered(parts)   puts what was computed back into the order of the whole step
    added, add_gradients                          sums over ranks

Guarantees:
- what a controller, a choice or a metric is made of is that of the whole step, on every rank and in
  the order that one process would have it: choices are the same ones, sums differ by the order of
  additions alone. Updates are the same bits on all ranks, so nothing needs to be sent around;
- every rank takes part in every exchange, also one without a micro-batch: whether there is an
  exchange follows from the step, never from what a rank computed;
- where torch.distributed is not initialised, all of this is the identity.

Takes: results by micro-batch, gradients. Gives: those of the step. Waits for: the other ranks, at
most for the timeout of the process group.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

T = TypeVar("T")


def place() -> tuple[int, int]:
    """(rank, number of ranks) of this process; (0, 1) where it is the only one."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def own(count: int) -> range:
    """Which of `count` micro-batches this rank computes."""
    rank, world = place()
    return range(rank, count, world)


def gathered(parts: Sequence[T]) -> list[T]:
    """One part for each micro-batch of the step, in order.

    Args:
        parts: of the micro-batches of `own`, in order; on the CPU.
    """
    _, world = place()
    of_rank = _of_all(list(parts))
    return [of_rank[i % world][i // world] for i in range(sum(map(len, of_rank)))]


def added(sums: Mapping[str, float]) -> dict[str, float]:
    """The sums of all ranks by name; a rank that lacks a name adds nothing to it."""
    out: dict[str, float] = {}
    for of_rank in _of_all(dict(sums)):
        for name, value in of_rank.items():
            out[name] = out.get(name, 0.0) + value
    return out


def add_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """In place. A parameter that no rank has a gradient of stays without one."""
    if place()[1] == 1:
        return
    parameters = list(parameters)
    held = torch.tensor([p.grad is not None for p in parameters], dtype=torch.float32)
    held = held.to(parameters[0].device)
    dist.all_reduce(held)
    waiting = []
    for parameter, holders in zip(parameters, held.tolist(), strict=True):
        if not holders:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        waiting.append(dist.all_reduce(parameter.grad, async_op=True))
    for work in waiting:
        work.wait()


def _of_all(value: T) -> list[T]:
    _, world = place()
    if world == 1:
        return [value]
    found: list[Any] = [None] * world
    dist.all_gather_object(found, value)
    return found
