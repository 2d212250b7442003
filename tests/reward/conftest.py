"""Trajectories to grade."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from treadle.reward import GraderPool
from treadle.types import (
    Message,
    Node,
    Party,
    SamplingParams,
    Source,
    Status,
    StopReason,
    Task,
    Trajectory,
)

Make = Callable[..., Trajectory]


@pytest.fixture
def make() -> Make:
    def make(answer: str = "12", task: Task | None = None, sample: int = 0) -> Trajectory:
        task = task or Task(id="t", taskset="sums", messages=(), data={"answer": "12", "list": [1]})
        node = Node(
            id=0,
            parent=None,
            party=Party.POLICY,
            source=Source.SAMPLED,
            ids=(1, 2),
            trained=(True, True),
            logprobs=(-0.5, -0.25),
            versions=(0, 0),
            message=Message(role="assistant", content=answer),
            stop_reason=StopReason.EOS,
        )
        return Trajectory(
            id=f"0/{sample}",
            task=task,
            sample=sample,
            nodes=(node,),
            status=Status.FINISHED,
            sampling=SamplingParams(max_new_tokens=8),
        )

    return make


@pytest.fixture(scope="module")
def pool() -> Iterator[GraderPool]:
    """One worker for all tests of a file; it is replaced when a test makes it die."""
    with GraderPool(workers=1) as pool:
        yield pool
