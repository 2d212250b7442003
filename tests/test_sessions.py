"""A run that is driven from outside: sessions opened, judged, released, trained on."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import treadle as td
from treadle.config import LearnConfig, ModelConfig, RolloutConfig, RunConfig, StoreConfig
from treadle.errors import DataError, HarnessError
from treadle.store import Store
from treadle.types import Message, Task


def small(**changes: Any) -> RunConfig:
    values: dict[str, Any] = {
        "steps": 2,
        "model": ModelConfig(name="tiny-random", dtype="float32", max_context=96),
        "rollout": RolloutConfig(group_size=3, groups_per_step=2, max_new_tokens=6),
        "store": StoreConfig(checkpoint_every=1),
    }
    return RunConfig(**(values | changes))


def ask(base_url: str, text: str) -> str:
    body = {"messages": [{"role": "user", "content": text}]}
    request = urllib.request.Request(f"{base_url}/chat/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=30) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]


async def rollout(run: Any, task: Any, reward: float) -> str:
    session = await run.sessions.open(task)
    said = await asyncio.to_thread(ask, session.base_url, "say something")
    session.reward(reward, length=len(said))
    session.release()
    session.release()
    return said


def play(coroutine: Any) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 100))


def test_sessions_of_a_task_are_a_group_and_full_batches_are_trained(tmp_path: Path) -> None:
    async def main() -> None:
        async with td.open_run(config=small(), run_dir=tmp_path / "run") as run:
            for step in range(2):
                await asyncio.gather(
                    *(rollout(run, f"task {step} {t}", i / 3) for t in "ab" for i in range(3))
                )
        assert run.step == 2

    play(main())
    with Store.open(tmp_path / "run", readonly=True) as store:
        assert store.info().status == "finished"
        assert [s.step for s in store.steps()] == [1, 2]
        for step in (1, 2):
            for group in store.groups(step=step):
                assert len(group.scored) == 3
                assert {t.reward.value for t in group.trajectories} == {0.0, 1 / 3, 2 / 3}
                assert all(t.reward.parts["length"] >= 0 for t in group.trajectories)
                assert all(t.num_trained_tokens > 0 for t in group.trajectories)
        assert next(store.groups(step=2)).version == 1, (
            "the second batch saw the first one's update"
        )


def test_leaving_early_keeps_what_is_trained_and_lets_the_rest_go(tmp_path: Path) -> None:
    async def main() -> None:
        config = small(steps=5, store=StoreConfig(checkpoint_every=100))
        async with td.open_run(config=config, run_dir=tmp_path / "run") as run:
            await asyncio.gather(*(rollout(run, t, i / 3) for t in "ab" for i in range(3)))
            left = await run.sessions.open("never finished")
        assert run.step == 1 and left._released.is_set()

    play(main())
    with Store.open(tmp_path / "run", readonly=True) as store:
        assert len(store.steps()) == 1 and store.info().status == "finished"
        assert store.frontier().step == 1 and store.checkpoints(), "what is trained can be exported"


def test_a_run_that_is_over_says_so(tmp_path: Path) -> None:
    async def main() -> None:
        async with td.open_run(config=small(steps=1), run_dir=tmp_path / "run") as run:
            await asyncio.gather(*(rollout(run, t, i / 3) for t in "ab" for i in range(3)))
            with pytest.raises(HarnessError, match="all of its steps"):
                while True:
                    await rollout(run, "one more", 0.5)

    play(main())


def test_the_runs_own_error_reaches_whoever_opens(tmp_path: Path) -> None:
    """Parity that cannot hold stops the run; the block hears of it at its next call."""

    async def main() -> None:
        config = small(learn=LearnConfig(parity_stop=1e-12))
        async with td.open_run(config=config, run_dir=tmp_path / "run") as run:
            for _ in range(50):
                await asyncio.gather(*(rollout(run, t, i / 3) for t in "ab" for i in range(3)))

    with pytest.raises(td.TreadleError, match="trainer and sampler disagree"):
        play(main())
    with Store.open(tmp_path / "run", readonly=True) as store:
        assert store.info().status == "failed"


def test_what_is_no_task_and_no_reward_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with td.open_run(config=small(), run_dir=tmp_path / "run") as run:
            with pytest.raises(DataError, match="a Task or a text"):
                await run.sessions.open(3)
            task = Task(id="t", taskset="mine", messages=(Message(role="user", content="x"),))
            session = await run.sessions.open(task)
            assert session.task is task
            with pytest.raises(DataError, match="finite"):
                session.reward(float("nan"))
            session.release()
            with pytest.raises(HarnessError, match="before it is released"):
                session.reward(1.0)

    play(main())
