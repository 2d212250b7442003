"""A group: several trajectories of one task, run together and compared later.

Guarantees: a bad trajectory is data and never holds up or spoils its siblings; only failures of
the sampler are tried again, a bounded number of times that is recorded in `info["retries"]`, and
  only where nobody outside has had the trajectory already; when
a contract breaks or the group is cancelled, every sibling is stopped before the error goes on.

Takes: a Task. Gives: a Group. Waits for: its trajectories, each of which is bounded.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from treadle.config import RolloutConfig
from treadle.harness import Harness
from treadle.harness.types import Handed
from treadle.render import Renderer
from treadle.rollout.run import Grade, run_trajectory
from treadle.tools import Tools
from treadle.types import Group, Sampler, Status, Task, Trajectory

MAX_RETRIES = 2
"""Further tries of a trajectory whose sampler failed; harness and tool errors are not retried."""


async def run_group(
    task: Task,
    ordinal: int,
    size: int,
    *,
    sampler: Sampler,
    renderer: Renderer,
    harness: Harness,
    tools: Tools,
    config: RolloutConfig,
    max_context: int,
    seed: int,
    grade: Grade,
) -> Group:
    """Run `size` trajectories of `task` at the same time; arguments as in `run_trajectory`."""
    version = sampler.version

    async def one(sample: int) -> Trajectory:
        attempt = 0
        while True:
            trajectory = await run_trajectory(
                task,
                ordinal,
                sample,
                sampler=sampler,
                renderer=renderer,
                harness=harness,
                tools=tools,
                config=config,
                max_context=max_context,
                seed=seed,
                grade=grade,
                attempt=attempt,
            )
            again = attempt < MAX_RETRIES and _sampler_failed(trajectory)
            if isinstance(harness, Handed):
                again = harness.again(trajectory, again)
            if not again:
                return replace(trajectory, info={**trajectory.info, "retries": attempt})
            attempt += 1

    runs = [asyncio.ensure_future(one(i)) for i in range(size)]
    try:
        trajectories = await asyncio.gather(*runs)
    finally:
        for run in runs:
            run.cancel()
        await asyncio.gather(*runs, return_exceptions=True)
    versions = [v for t in trajectories for n in t.nodes for v in n.versions if v >= 0]
    return Group(
        ordinal=ordinal,
        task=task,
        trajectories=tuple(trajectories),
        version=min(versions, default=version),
    )


def _sampler_failed(trajectory: Trajectory) -> bool:
    error = trajectory.error
    return trajectory.status is Status.FAILED and error is not None and error.kind == "SamplerError"
