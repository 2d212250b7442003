"""Groups with given rewards, for the advantage tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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


def make_trajectory(
    ordinal: int,
    sample: int,
    reward: float | None,
    *,
    trained: int = 2,
    branches: int = 1,
    status: Status = Status.FINISHED,
) -> Trajectory:
    """A prompt of one token, then `branches` completions of `trained` tokens each."""
    prompt = Node(
        id=0,
        parent=None,
        party=Party.USER,
        source=Source.OBSERVATION,
        ids=(1,),
        trained=(False,),
        logprobs=(float("nan"),),
        versions=(-1,),
    )
    completions = tuple(
        Node(
            id=1 + branch,
            parent=0,
            party=Party.POLICY,
            source=Source.SAMPLED,
            ids=(2,) * trained,
            trained=(True,) * trained,
            logprobs=(-1.0,) * trained,
            versions=(0,) * trained,
        )
        for branch in range(branches)
    )
    return Trajectory(
        id=f"{ordinal}/{sample}",
        task=Task(id=f"task {ordinal}", taskset="toy", messages=()),
        sample=sample,
        nodes=(prompt, *completions),
        status=status,
        sampling=SamplingParams(max_new_tokens=8),
        reward=Reward(value=reward),
    )


def make_group(ordinal: int, trajectories: Sequence[Trajectory]) -> Group:
    task = Task(id=f"task {ordinal}", taskset="toy", messages=())
    return Group(ordinal=ordinal, task=task, trajectories=tuple(trajectories), version=0)


@pytest.fixture
def trajectory() -> Callable[..., Trajectory]:
    return make_trajectory


@pytest.fixture
def group() -> Callable[..., Group]:
    """group(ordinal, [rewards or trajectories])"""

    def build(ordinal: int, members: Sequence[float | Trajectory | None]) -> Group:
        return make_group(
            ordinal,
            [
                m if isinstance(m, Trajectory) else make_trajectory(ordinal, i, m)
                for i, m in enumerate(members)
            ],
        )

    return build
