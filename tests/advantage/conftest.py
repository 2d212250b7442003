"""Groups with given rewards, for the advantage tests."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import pytest

from treadle.types import (
    Group,
    Node,
    Party,
    Reward,
    SamplingParams,
    Source,
    Status,
    Task,
    Trajectory,
)


def seen(id: int, parent: int | None, *ids: int, agent: tuple[int, ...] = ()) -> Node:
    """An observation."""
    return Node(
        id=id,
        parent=parent,
        party=Party.ENVIRONMENT,
        source=Source.OBSERVATION,
        ids=ids,
        trained=(False,) * len(ids),
        logprobs=(math.nan,) * len(ids),
        versions=(-1,) * len(ids),
        agent=agent,
    )


def said(
    id: int,
    parent: int | None,
    count: int,
    *,
    party: Party = Party.POLICY,
    agent: tuple[int, ...] = (),
    trained: bool = True,
) -> Node:
    """A sampled turn of `count` tokens, its end of sequence included."""
    return Node(
        id=id,
        parent=parent,
        party=party,
        source=Source.SAMPLED,
        ids=(*(2,) * (count - 1), 0)[:count],
        trained=(trained,) * count,
        logprobs=(-1.0,) * count,
        versions=(0,) * count,
        agent=agent,
    )


def make_trajectory(
    ordinal: int,
    sample: int,
    reward: float | None,
    *,
    trained: int = 2,
    branches: int = 1,
    observed: int = 1,
    status: Status = Status.FINISHED,
    parts: Mapping[str, float] | None = None,
    nodes: Sequence[Node] | None = None,
) -> Trajectory:
    """A prompt of `observed` tokens, then `branches` completions of `trained` tokens each. The
    part "score" is the reward."""
    if nodes is None:
        turns = [said(1 + branch, 0, trained) for branch in range(branches)]
        nodes = [seen(0, None, *range(1, 1 + observed)), *turns]
    if parts is None:
        parts = {} if reward is None else {"score": reward}
    return Trajectory(
        id=f"{ordinal}/{sample}",
        task=Task(id=f"task {ordinal}", taskset="toy", messages=()),
        sample=sample,
        nodes=tuple(nodes),
        status=status,
        sampling=SamplingParams(max_new_tokens=8),
        reward=Reward(value=reward, parts=parts),
    )


def make_group(ordinal: int, members: Sequence[float | Trajectory | None]) -> Group:
    """Rewards become trajectories of two trained tokens."""
    return Group(
        ordinal=ordinal,
        task=Task(id=f"task {ordinal}", taskset="toy", messages=()),
        trajectories=tuple(
            m if isinstance(m, Trajectory) else make_trajectory(ordinal, i, m)
            for i, m in enumerate(members)
        ),
        version=0,
    )


@pytest.fixture
def trajectory() -> Callable[..., Trajectory]:
    return make_trajectory


@pytest.fixture
def group() -> Callable[..., Group]:
    """group(ordinal, [rewards or trajectories])"""
    return make_group
