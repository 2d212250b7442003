"""The grader of a run's task sets, and the rewards that a config can name."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from treadle.config import TasksConfig
from treadle.errors import ConfigError, RewardError
from treadle.reward import GraderPool, grader_of
from treadle.reward.builtin import shaped
from treadle.reward.graders import TasksetGrader
from treadle.tasks import open_mix, open_taskset
from treadle.types import Reward, Task, Trajectory

Make = Callable[..., Trajectory]


@pytest.fixture
def config(tmp_path: Path) -> TasksConfig:
    path = tmp_path / "sums.jsonl"
    rows = [{"prompt": f"{i} + 5 =", "answer": str(i + 5), "split": "train"} for i in range(5)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return TasksConfig(source=f"jsonl:{path}")


def with_reward(config: TasksConfig, reward: str) -> TasksConfig:
    return TasksConfig(source=config.source, reward=reward)


def test_the_sets_own_scores_become_parts_and_the_named_one_the_reward(
    config: TasksConfig, make: Make
) -> None:
    task = open_taskset(config, 0).task(0)
    gold = task.data["answer"]
    said = make(f"It is {gold}.", task)
    assert grader_of(config, 0)(said) == {"score": 0.0, "lenient": 1.0, "reward": 0.0}
    lenient = grader_of(with_reward(config, "lenient"), 0)
    assert lenient(said) == {"score": 0.0, "lenient": 1.0, "reward": 1.0}
    assert lenient(make(gold, task))["reward"] == 1.0


def test_shaped_by_hand(config: TasksConfig, make: Make) -> None:
    def value(answer: str, score: float, lenient: float, gold: str = "12") -> float:
        task = Task(id="t", taskset="s", messages=(), data={"answer": gold})
        trajectory = make(answer, task)
        parts = {"score": score, "lenient": lenient}
        object.__setattr__(trajectory, "reward", Reward(value=None, parts=parts))
        return shaped(trajectory)

    assert value("12", 1, 1) == 1.0
    assert value("13", 0, 0) == 0.2, "the form alone"
    assert value("7 + 5 = 12", 0, 1) == pytest.approx(0.2 * (1 + 2 / 10) / 2)
    assert value("12.0", 0, 1) == pytest.approx(0.2 + 0.2 * (1 + 2 / 4) / 2)
    assert value("7 + 5 = 13", 0, 0) == 0.0
    assert value("", 0, 0) == 0.0
    assert value("13", 0.5, 0) == pytest.approx(0.5 + 0.5 * 0.2)
    rising = [value(a, 0, 1) for a in ("so 7 + 5 = 12", "7 + 5 = 12", "It is 12", "= 12")]
    assert rising == sorted(rising) and rising[-1] < 0.2, "below any bare number"
    assert value("yes", 0, 0, gold="no") == 0.2
    assert value("I say no", 0, 1, gold="no") == pytest.approx(0.2 * (1 + 2 / 8) / 2)
    assert value("", 0, 0, gold="") == 0.0
    task = Task(id="t", taskset="s", messages=(), data={"answer": "12"})
    with pytest.raises(RewardError, match="needs the scores of a task set"):
        shaped(make("12", task))


def test_a_named_function_gets_the_sets_scores(config: TasksConfig, make: Make) -> None:
    task = open_taskset(config, 0).task(0)
    grader = grader_of(with_reward(config, "treadle.reward.builtin:shaped"), 0)
    gold = task.data["answer"]
    assert grader(make(gold, task)) == {"score": 1.0, "lenient": 1.0, "reward": 1.0}
    said = grader(make(f"= {gold}", task))
    assert 0 < said["reward"] < 0.5 and said["score"] == 0.0


def test_a_function_that_returns_parts_cannot_rename_the_sets_scores(
    config: TasksConfig, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rewards_for_test.py").write_text(
        "def parts(t): return {'score': 0.75, 'brevity': 0.5}\n"
        "def poem(t): return float('rose' in t.answer)\n"
        "number = 1\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    task = open_taskset(config, 0).task(0)
    got = grader_of(with_reward(config, "rewards_for_test:parts"), 0)(make("no", task))
    assert got == {"score": 0.0, "lenient": 0.0, "brevity": 0.5, "reward": 0.75}
    with pytest.raises(ConfigError, match="`rewards_for_test:number` is not a function"):
        grader_of(with_reward(config, "rewards_for_test:number"), 0)

    rows = tmp_path / "poems.jsonl"
    rows.write_text(json.dumps({"prompt": "Write.", "split": "train"}))
    poems = TasksConfig(source=f"jsonl:{rows}", reward="rewards_for_test:poem")
    task = open_taskset(poems, 0).task(0)
    assert grader_of(poems, 0)(make("a rose", task)) == {"reward": 1.0}
    paid = grader_of(with_reward(poems, "rewards_for_test:parts"), 0)(make("a rose", task))
    assert paid == {"brevity": 0.5, "reward": 0.75}, "`score` is the name of a task set's own"
    with pytest.raises(RewardError, match="no `answer` to grade against"):
        grader_of(TasksConfig(source=poems.source), 0)(make("a rose", task))


def test_an_async_function_is_a_reward_by_name_too(
    config: TasksConfig, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "async_rewards_for_test.py").write_text(
        "import asyncio\n"
        "async def number(t):\n    await asyncio.sleep(0)\n    return 0.5\n"
        "async def parts(t): return {'score': 0.75, 'brevity': 0.5}\n"
        "class Judge:\n    async def __call__(self, t): return 0.25\n"
        "judge = Judge()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    task = open_taskset(config, 0).task(0)
    with GraderPool(workers=1) as pool:

        def graded(name: str) -> Reward:
            grader = grader_of(with_reward(config, f"async_rewards_for_test:{name}"), 0)
            return pool.score_sync(grader, make("no", task), 20.0)

        assert graded("number") == Reward(value=0.5, parts={"score": 0.0, "lenient": 0.0})
        assert graded("judge").value == 0.25
        assert graded("parts") == Reward(
            value=0.75, parts={"score": 0.0, "lenient": 0.0, "brevity": 0.5}
        )


def test_a_function_that_takes_no_trajectory_is_found_before_the_run(
    config: TasksConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "odd_rewards_for_test.py").write_text(
        "def none(): return 1.0\ndef two(t, gold): return 1.0\ndef kept(t, *, w=1.0): return w\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("none", "two"):
        with pytest.raises(ConfigError, match="cannot be called with one trajectory"):
            grader_of(with_reward(config, f"odd_rewards_for_test:{name}"), 0)
    grader_of(with_reward(config, "odd_rewards_for_test:kept"), 0)


def test_a_wrong_reward_name_is_found_before_the_run(config: TasksConfig) -> None:
    with pytest.raises(
        ConfigError, match=r"`tasks.0.reward` is `scor`\nhint: did you mean `score`"
    ):
        grader_of(with_reward(config, "scor"), 0)
    with pytest.raises(ConfigError, match=r"did you mean `shaped`"):
        grader_of(with_reward(config, "treadle.reward.builtin:shape"), 0)


def test_one_grader_for_all_task_sets_of_a_run(
    config: TasksConfig, make: Make, pool: GraderPool
) -> None:
    pytest.importorskip("reasoning_gym")
    gcd = TasksConfig(source="reasoning_gym:gcd")
    small = TasksConfig(source="reasoning_gym:gcd", options={"max_value": 9}, reward="lenient")
    configs = (config, gcd, small)
    mix = open_mix(configs, seed=3)
    grader = grader_of(configs, seed=3)
    seen = set()
    for ordinal in range(6):
        task = mix.task(ordinal)
        seen.add(task.taskset)
        gold = mix[task.taskset].gold(task)
        reward = pool.score_sync(grader, make(gold, task), 20.0)
        assert reward.value == 1.0, reward
        assert reward.parts["score"] == reward.parts["lenient"] == 1.0
        said = pool.score_sync(grader, make(f"so {gold}", task), 20.0)
        assert said.value == (1.0 if task.taskset.endswith("#2") else 0.0)
    assert len(seen) == 3
    odd = Task(id="x", taskset="elsewhere", messages=())
    reward = pool.score_sync(grader, make("1", odd), 20.0)
    assert reward.error is not None and "does not know" in reward.error.message


def test_a_grader_is_a_value_that_pickles(config: TasksConfig) -> None:
    grader = grader_of(config, 0)
    assert grader == grader_of(config, 0) == pickle.loads(pickle.dumps(grader))
    assert hash(grader) == hash(grader_of(config, 0))
    assert len(pickle.dumps(grader)) < 1_000


@pytest.mark.parametrize("value", [1.5, -0.5, float("nan"), float("inf")])
def test_a_task_set_score_out_of_range_is_unscored(
    config: TasksConfig, make: Make, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    """B122."""

    class Bad:
        name = config.source

        def grade(self, task: Task, answer: str) -> Mapping[str, float]:
            return {"score": value}

        def gold(self, task: Task) -> str | None:
            return "x"

    grader: TasksetGrader = grader_of(config, 0)
    task = open_taskset(config, 0).task(0)
    bad: Any = lambda *args: (Bad(), "score")  # noqa: E731
    monkeypatch.setattr("treadle.reward.graders._opened", bad)
    with pytest.raises(RewardError, match=r"outside of \[0, 1\]"):
        grader(make("1", task))
