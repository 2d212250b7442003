"""Trajectories to training rows: one per branch, every sampled token trained exactly once.

Guarantees:
- a row is the concatenation of its branch's nodes, id by id; nothing is encoded again;
- a node that several branches share is trained in the first of them only; later branches carry its
  tokens as context (untrained, so NaN as logprob and advantage and -1 as version);
- a turn begins under one version; its trained tokens of later ones are marked as overtaken;
- a token whose own advantage is NaN was taken out of the mask, and is context too;
- a trajectory outside `Group.scored` gives no row, nor does a branch with nothing left to train;
- of a demonstration the rows are made alike, without logprobs and versions, each with advantage 1.

Takes: Groups and the advantage of each trajectory, one number or one per token of its nodes.
Gives: Samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from treadle.advantage import Advantage
from treadle.errors import ContractError
from treadle.types import Group, Sample, Trajectory


def samples(groups: Sequence[Group], advantages: Mapping[str, Advantage]) -> list[Sample]:
    """Training rows of the groups, in order of group, trajectory and branch.

    Args:
        groups: of one step.
        advantages: by trajectory id; every trajectory of `Group.scored` has one.

    Raises:
        ContractError: an advantage is missing, not finite or of another length than its node, a
            trajectory was sampled at temperature 0, or the very first token of a branch is marked
            as trained.
    """
    out: list[Sample] = []
    for group in groups:
        for trajectory in group.scored:
            by_node = _by_node(trajectory, group.ordinal, advantages.get(trajectory.id, math.nan))
            out.extend(_rows(trajectory, group.ordinal, by_node))
    return out


def demonstrations(groups: Sequence[Group]) -> list[Sample]:
    """Rows of groups that were demonstrated (`Group.demonstrated`), in the same order."""
    return [
        row
        for group in groups
        for trajectory in group.trajectories
        for row in _rows(trajectory, group.ordinal, _by_node(trajectory, group.ordinal, 1.0))
    ]


def spread(advantage: float, trained: Sequence[bool]) -> tuple[float, ...]:
    """One advantage for all trained tokens, NaN for the others."""
    return tuple(advantage if t else math.nan for t in trained)


def _by_node(
    trajectory: Trajectory, ordinal: int, advantage: Advantage
) -> dict[int, tuple[float, ...]]:
    """The advantage of every token of every node with trained tokens."""
    where = f"trajectory {trajectory.id} of group {ordinal}"
    out: dict[int, tuple[float, ...]] = {}
    for node in trajectory.nodes:
        if not any(node.trained):
            out[node.id] = (math.nan,) * len(node.ids)
            continue
        given = (
            advantage.get(node.id, ())
            if isinstance(advantage, Mapping)
            else (advantage,) * len(node.ids)
        )
        if len(given) != len(node.ids):
            raise ContractError(
                f"{where} has {len(given)} advantages for the {len(node.ids)} tokens of its node "
                f"{node.id}"
            )
        for t, value in enumerate(given):
            masked = isinstance(advantage, Mapping) and math.isnan(value)
            if node.trained[t] and not masked and not math.isfinite(value):
                raise ContractError(
                    f"{where} has no finite advantage (got {value} for token {t} of node {node.id})"
                )
        out[node.id] = given
    return out


def _rows(
    trajectory: Trajectory, ordinal: int, by_node: Mapping[int, tuple[float, ...]]
) -> Iterator[Sample]:
    temperature = trajectory.sampling.temperature
    if not temperature > 0:
        raise ContractError(
            f"trajectory {trajectory.id} was sampled at temperature {temperature}: a greedy "
            "rollout has no behaviour distribution to learn from",
            hint="train on rollouts with temperature > 0",
        )
    seen: set[int] = set()
    for branch in trajectory.branches():
        ids: list[int] = []
        trained: list[bool] = []
        logprobs: list[float] = []
        versions: list[int] = []
        advantages: list[float] = []
        overtaken: list[bool] = []
        for node in branch:
            values = by_node[node.id]
            fresh = [
                node.id not in seen and t and not math.isnan(a)
                for t, a in zip(node.trained, values, strict=True)
            ]
            ids += node.ids
            trained += fresh
            logprobs += [x if t else math.nan for x, t in zip(node.logprobs, fresh, strict=True)]
            versions += [v if t else -1 for v, t in zip(node.versions, fresh, strict=True)]
            advantages += [a if t else math.nan for a, t in zip(values, fresh, strict=True)]
            began = next((v for v in node.versions if v >= 0), -1)
            overtaken += [t and v != began for v, t in zip(node.versions, fresh, strict=True)]
        seen.update(node.id for node in branch)
        if not any(trained):
            continue
        if trained[0]:
            raise ContractError(
                f"trajectory {trajectory.id}: the first token of a branch is marked as trained, "
                "but nothing precedes it that could predict it"
            )
        yield Sample(
            trajectory_id=trajectory.id,
            ordinal=ordinal,
            ids=tuple(ids),
            trained=tuple(trained),
            logprobs=tuple(logprobs),
            versions=tuple(versions),
            advantages=tuple(advantages),
            temperature=temperature,
            taskset=trajectory.task.taskset,
            overtaken=tuple(overtaken) if any(overtaken) else (),
        )
