"""A run that is driven from outside: sessions opened, judged, released, trained on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import treadle as td
from tests.gateway.bench import renderer, sampler_of
from treadle.config import LearnConfig, ModelConfig, RolloutConfig, RunConfig, StoreConfig
from treadle.errors import DataError, HarnessError, SamplerError
from treadle.rollout import run_group
from treadle.sessions import OpenSessions
from treadle.store import Store
from treadle.testing import ScriptedSampler
from treadle.threads import in_thread
from treadle.tools import Tools
from treadle.types import Group, Message, Task

RENDERER = renderer()


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
            for bad in (float("nan"), float("inf"), 1e300, "1", None, 10**400, 10**5000, 1j):
                with pytest.raises(DataError, match="expected a finite number"):
                    session.reward(bad)  # pyright: ignore[reportArgumentType]
            with pytest.raises(DataError, match=r"`part` of session\.reward is '1'"):
                session.reward(1.0, part="1")  # pyright: ignore[reportArgumentType]
            for name in ("reward", "score"):
                with pytest.raises(DataError, match=f"named `{name}`"):
                    session.reward(1.0, **{name: 0.25})
            session.release()
            with pytest.raises(HarnessError, match="before it is released"):
                session.reward(1.0)

    play(main())


# ----------------------------------------------------------------------- places that fail


@contextlib.asynccontextmanager
async def driven(sampler: ScriptedSampler, size: int = 3) -> AsyncIterator[Any]:
    """OpenSessions over scripted turns; every group that is asked for runs at once."""
    sessions, groups = OpenSessions(size), []
    sessions._run = asyncio.get_running_loop().create_future()

    async def group(task: Task, ordinal: int) -> Group:
        return await run_group(
            task,
            ordinal,
            size,
            sampler=sampler,
            renderer=RENDERER,
            harness=sessions,
            tools=Tools(),
            config=RolloutConfig(max_new_tokens=50, time_limit_s=60.0),
            max_context=400,
            seed=0,
            grade=sessions.grade,
        )

    async def start() -> None:
        with contextlib.suppress(StopIteration, RuntimeError):
            while True:
                task = await in_thread(sessions.stream.task, len(groups))
                groups.append(asyncio.ensure_future(group(task, len(groups))))

    starting = asyncio.ensure_future(start())
    try:
        yield sessions, groups
    finally:
        sessions.stream.close()
        for work in (*groups, starting):
            work.cancel()
        await asyncio.gather(*groups, starting, return_exceptions=True)


def of_user(text: str, taskset: str = "mine") -> Task:
    return Task(id="0", taskset=taskset, messages=(Message(role="user", content=text),))


def test_a_session_whose_sampler_failed_is_final() -> None:
    """Nobody would open another try of it."""

    async def main() -> None:
        sampler = sampler_of(
            RENDERER, lambda name, turn: SamplerError("once") if name == "0/0" else "fine"
        )
        async with driven(sampler) as (sessions, groups):
            for i in range(3):
                session = await sessions.open("q")
                with contextlib.suppress(urllib.error.HTTPError):
                    await asyncio.to_thread(ask, session.base_url, "hi")
                session.reward(float(i))
                session.release()
            group = await groups[0]
            assert [t.info["retries"] for t in group.trajectories] == [0, 0, 0]
            assert sorted(t.status.value for t in group.trajectories) == [
                "failed",
                "finished",
                "finished",
            ]
            assert not sessions._begun, "nothing is kept of what has ended"

    play(main())


class Closed(ScriptedSampler):
    """Cannot open sessions whose name starts with one of `shut`."""

    shut: tuple[str, ...] = ()

    async def open(self, session: str, **more: Any) -> None:
        if session.startswith(self.shut):
            raise SamplerError(f"no room for {session}")
        await super().open(session, **more)


def closed(shut: tuple[str, ...]) -> Closed:
    plain = sampler_of(RENDERER, lambda session, turn: "fine")
    sampler = Closed(script=plain.script, encode=plain.encode, stop_ids=plain.stop_ids, version=3)
    sampler.shut = shut
    return sampler


def test_a_place_that_never_begins_is_not_waited_for() -> None:
    async def main() -> None:
        async with driven(closed(("0/0",))) as (sessions, groups):
            held = [asyncio.ensure_future(sessions.open("q")) for _ in range(3)]
            done, _ = await asyncio.wait(held)
            failed = [work.exception() for work in done if work.exception()]
            assert len(failed) == 1 and isinstance(failed[0], HarnessError)
            assert "no room for 0/0" in str(failed[0]) and "open again" in failed[0].hint
            await sessions.open("q")
            assert len(groups) == 2, "another one comes from another group"

    play(main())


def test_a_place_that_begins_at_its_second_try_is_waited_for() -> None:
    class Once(Closed):
        async def open(self, session: str, **more: Any) -> None:
            if "#" in session:
                self.shut = ()
            await super().open(session, **more)

    async def main() -> None:
        sampler = closed(("0/",))
        sampler.__class__ = Once
        async with driven(sampler) as (sessions, groups):
            await asyncio.gather(*(sessions.open("q") for _ in range(3)))
            assert len(groups) == 1

    play(main())


def test_tasks_of_one_id_are_told_apart_by_task_set_and_question() -> None:
    async def main() -> None:
        tasks = [of_user("A", "a"), of_user("B", "b"), of_user("C", "b")]
        async with driven(closed(("none",))) as (sessions, groups):
            for task in tasks:
                assert (await sessions.open(task)).task is task
            assert len(groups) == 3

    play(main())


def test_a_session_handed_to_an_open_that_is_cancelled_goes_to_the_next() -> None:
    async def main() -> None:
        async with driven(closed(("none",))) as (sessions, groups):
            opening = asyncio.ensure_future(sessions.open("q"))
            offer = sessions._offer

            def offer_and_cancel(shelf: Any, session: Any) -> None:
                sessions._offer = offer
                offer(shelf, session)
                opening.cancel()

            sessions._offer = offer_and_cancel
            with pytest.raises(asyncio.CancelledError):
                await opening
            opened = [await sessions.open("q") for _ in range(3)]
            assert len({session.api_key for session in opened}) == 3 and len(groups) == 1

    play(main())
