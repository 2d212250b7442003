"""Unmodified agents trained through the gateway: the reward rises, on the engine's own tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.gateway import agents, rewards
from treadle.api import run_config
from treadle.config import (
    EvalConfig,
    LearnConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    StoreConfig,
    TasksConfig,
)
from treadle.sampler.engine import Engine
from treadle.store import Store
from treadle.types import Completion, Sample, SamplingParams

Log = list[tuple[tuple[int, ...], Completion]]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tasks") / "sums.jsonl"
    rows = [{"prompt": f"{a}+{b}", "answer": str(a + b)} for a in range(10) for b in range(10)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(agents.build_caller(tmp_path_factory.mktemp("models") / "caller"))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(agents.build_wide(tmp_path_factory.mktemp("models") / "wide"))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    """Every completion that the engine gives, taken before anything else sees it."""
    kept: Log = []
    whole = Engine.sample

    async def sample(
        self: Engine, session: str, prompt: Sequence[int], params: SamplingParams
    ) -> Completion:
        completion = await whole(self, session, prompt, params)
        kept.append((tuple(prompt), completion))
        return completion

    monkeypatch.setattr(Engine, "sample", sample)
    return kept


def config(tasks: Path, agent: str, named: str, **changes: Any) -> RunConfig:
    values: dict[str, Any] = {
        "steps": 10,
        "model": ModelConfig(name=named, dtype="float32", max_context=512, lora=None),
        "tasks": (TasksConfig(source=f"jsonl:{tasks}"),),
        "rollout": RolloutConfig(
            harness=f"tests.gateway.agents:{agent}",
            group_size=8,
            groups_per_step=4,
            max_new_tokens=70,
            max_turns=6,
        ),
        "learn": LearnConfig(lr=1e-3),
        "eval": EvalConfig(questions=0),
        "store": StoreConfig(checkpoint_every=100),
    }
    return RunConfig(**(values | changes))


def runs_of(sample: Sample) -> list[tuple[int, int]]:
    """[start, end) of each stretch of trained tokens."""
    found, start = [], None
    for i, on in enumerate((*sample.trained, False)):
        if on and start is None:
            start = i
        elif not on and start is not None:
            found.append((start, i))
            start = None
    return found


def check_tokens(store: Store, log: Log) -> int:
    """Every trained stretch is one completion: after its very prompt, number for number."""
    known = {
        (
            prompt,
            c.ids,
            tuple(np.float32(c.logprobs).tolist()),
            c.versions,
        )
        for prompt, c in log
    }
    count = 0
    for step in store.steps():
        for sample in store.samples_of_step(step.step):
            for start, end in runs_of(sample):
                stretch = (
                    sample.ids[:start],
                    sample.ids[start:end],
                    tuple(np.float32(sample.logprobs[start:end]).tolist()),
                    sample.versions[start:end],
                )
                assert stretch in known, f"step {step.step}, tokens {start} to {end}"
                count += end - start
    return count


def means_of(store: Store) -> list[float]:
    return [s.metrics["reward/mean"] for s in store.steps()]


@pytest.mark.parametrize(
    "agent",
    [
        "openai_tool_loop",
        "anthropic_tool_loop",
        pytest.param("smolagent", marks=pytest.mark.slow),
    ],
)
def test_a_short_run_trains_on_the_engines_own_tokens(
    agent: str, tasks: Path, wide: str, tmp_path: Path, log: Log
) -> None:
    """A random model, two steps: whatever the agent does with its messages."""
    small = config(
        tasks,
        agent,
        wide,
        steps=2,
        rollout=RolloutConfig(
            harness=f"tests.gateway.agents:{agent}",
            group_size=3,
            groups_per_step=2,
            max_new_tokens=8,
        ),
        model=ModelConfig(name=wide, dtype="float32", max_context=4096),
    )
    run_config(small, tmp_path / "run", reward=rewards.letters)
    with Store.open(tmp_path / "run", readonly=True) as store:
        assert check_tokens(store, log) > 0
        trajectories = [t for s in (1, 2) for g in store.groups(step=s) for t in g.trajectories]
        assert all(t.info["gateway"]["requests"] >= 1 for t in trajectories)
        if agent == "smolagent":  # it writes errors into its own memory and asks again
            assert all(t.info["turns"] >= 2 for t in trajectories)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("agent", ["openai_tool_loop", "anthropic_tool_loop"])
def test_a_tool_loop_learns_to_use_its_tool(
    agent: str, tasks: Path, caller: str, tmp_path: Path, log: Log
) -> None:
    """Three seeds; the tool is used about half of the time before, nearly always after."""
    before, after = [], []
    for seed in range(3):
        log.clear()
        place = tmp_path / str(seed)
        run_config(config(tasks, agent, caller, seed=seed), place, reward=rewards.used_the_tool)
        with Store.open(place, readonly=True) as store:
            assert check_tokens(store, log) > 1000
            means = means_of(store)
            print(agent, seed, [round(m, 2) for m in means])
            before.append(sum(means[:2]) / 2)
            after.append(sum(means[-2:]) / 2)
            steps = range(1, len(means) + 1)
            used = [t for s in steps for g in store.groups(step=s) for t in g.trajectories]
            assert sum(t.tool_calls for t in used) > 100
            assert not sum(t.info["gateway"].get("rewrites", 0) for t in used)
            assert all(len(list(t.branches())) == 1 for t in used), "one spliced branch each"
    assert sum(after) / 3 > sum(before) / 3 + 0.1, (before, after)
    assert all(a > b for a, b in zip(after, before, strict=True)), (before, after)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_third_party_agent_is_trained_as_it_is(
    tasks: Path, wide: str, tmp_path: Path, log: Log
) -> None:
    """smolagents rewrites its history each step: every step is a branch, all of them trained."""
    before, after = [], []
    for seed in range(3):
        log.clear()
        place = tmp_path / str(seed)
        run = config(
            tasks,
            "smolagent",
            wide,
            seed=seed,
            steps=6,
            rollout=RolloutConfig(
                harness="tests.gateway.agents:smolagent",
                group_size=6,
                groups_per_step=4,
                max_new_tokens=12,
            ),
            model=ModelConfig(name=wide, dtype="float32", max_context=4096, lora=None),
        )
        run_config(run, place, reward=rewards.digits)
        with Store.open(place, readonly=True) as store:
            assert check_tokens(store, log) > 500
            means = means_of(store)
            print("smolagent", seed, [round(m, 2) for m in means])
            before.append(sum(means[:2]) / 2)
            after.append(sum(means[-2:]) / 2)
    assert sum(after) / 3 > sum(before) / 3 + 0.1, (before, after)
