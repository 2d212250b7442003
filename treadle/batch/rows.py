"""Trajectories to training rows: one per branch, every sampled token trained exactly once.

Guarantees:
- a row is the concatenation of its branch's nodes, id by id; nothing is encoded again;
- a node that several branches share is trained in the first of them only; later branches carry its
  tokens as context (untrained, so NaN as logprob and -1 as version);
- a trajectory outside `Group.scored` gives no row, nor does a branch with nothing left to train.

Takes: Groups and the advantage of each trajectory. Gives: Samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from treadle.errors import ContractError
from treadle.types import Group, Sample, Trajectory


def samples(groups: Sequence[Group], advantages: Mapping[str, float]) -> list[Sample]:
    """Training rows of the groups, in order of group, trajectory and branch.

    Args:
        groups: of one step.
        advantages: by trajectory id; every trajectory of `Group.scored` has one.

    Raises:
        ContractError: an advantage is missing or not finite, a trajectory was sampled at
            temperature 0, or the very first token of a branch is marked as trained.
    """
    out: list[Sample] = []
    for group in groups:
        for trajectory in group.scored:
            advantage = advantages.get(trajectory.id, math.nan)
            if not math.isfinite(advantage):
                raise ContractError(
                    f"trajectory {trajectory.id} of group {group.ordinal} has no finite advantage "
                    f"(got {advantages.get(trajectory.id)})"
                )
            out.extend(_rows(trajectory, group.ordinal, advantage))
    return out


def _rows(trajectory: Trajectory, ordinal: int, advantage: float) -> Iterator[Sample]:
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
        for node in branch:
            fresh = [node.id not in seen and t for t in node.trained]
            ids += node.ids
            trained += fresh
            logprobs += [x if t else math.nan for x, t in zip(node.logprobs, fresh, strict=True)]
            versions += [v if t else -1 for v, t in zip(node.versions, fresh, strict=True)]
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
            advantage=advantage,
            temperature=temperature,
        )
