"""The grader of a run's task sets: the set's own scores, and the reward that a config names.

A TasksetGrader is a value (two of one config are equal), cheap to pickle, and opens its task set
once per worker. So the scores a policy is trained on are made where a reply that hangs a grader
costs one call.

Takes: TasksConfig. Gives: a function from Trajectory to named scores, for GraderPool.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treadle.config import TasksConfig, to_dict
from treadle.errors import ConfigError, RewardError, did_you_mean, setting
from treadle.tasks import names_of, open_taskset
from treadle.tools import import_object
from treadle.types import Reward, Task, Taskset, Trajectory

OWN_REWARDS = ("score", "lenient")
"""Scores of a task set that a config can name. As parts of a reward these names belong to the
set: where "score" is among the parts, the set graded the answer."""


@dataclass(frozen=True, slots=True)
class TasksetGrader:
    """Grades trajectories of the configured task sets, by `trajectory.task.taskset`.

    Call it with a Trajectory: it gives the task set's named scores ("score" is the strict one,
    "lenient" and "partial" where they exist) and, as "reward", what the config trains on; where
    that is an async function, an awaitable of them.
    """

    configs: tuple[str, ...]
    """JSON of each TasksConfig: text, so that a grader is hashable and equal by value."""
    names: tuple[str, ...]
    seed: int
    strict: bool = False
    """Give the set's own strict score as "reward" wherever the set can grade, whatever trains."""

    @property
    def name(self) -> str:
        """What errors call it."""
        return "of " + ", ".join(self.names)

    def prepare(self) -> None:
        """Open the task sets and import reward functions; counted as set-up, not as grading."""
        for config, name in zip(self.configs, self.names, strict=True):
            _opened(config, name, self.seed)

    def __call__(self, trajectory: Trajectory) -> dict[str, Any] | Awaitable[dict[str, Any]]:
        """Raises RewardError: an unknown task set, no such score, a score out of [0, 1]."""
        name = trajectory.task.taskset
        if name not in self.names:
            raise RewardError(
                f"trajectory {trajectory.id} is of task set `{name}`, which this grader does not "
                f"know",
                hint=did_you_mean(name, self.names),
            )
        taskset, reward = _opened(self.configs[self.names.index(name)], name, self.seed)
        scores = _scores(taskset, reward, trajectory)
        own = "score" if self.strict and scores else reward
        if own in OWN_REWARDS:
            if own not in scores:
                raise RewardError(
                    f"task set {name} has no score `{own}`; it has {', '.join(scores)}"
                )
            return {**scores, "reward": scores[own]}
        seen = dataclasses.replace(trajectory, reward=Reward(value=None, parts=scores))
        value = import_object(reward, "tasks.reward")(seen)
        return _later(value, scores) if inspect.isawaitable(value) else _joined(value, scores)


def grader_of(
    cfgs: TasksConfig | Sequence[TasksConfig], seed: int, *, strict: bool = False
) -> TasksetGrader:
    """The grader of one task set or of all task sets of a run (named as `open_mix` names them).

    `strict` is for evaluations: the set's own score, and the reward function only for a task
    that the set cannot grade (a JSONL row without `answer`).

    A reward "module:function" is imported here too, so that a wrong name is found at once. The
    function gets the trajectory with the task set's own scores in `trajectory.reward.parts`.

    Raises:
        ConfigError: a reward that cannot be imported or called with a trajectory.
    """
    cfgs = (cfgs,) if isinstance(cfgs, TasksConfig) else tuple(cfgs)
    for i, cfg in enumerate(cfgs):
        if cfg.reward in OWN_REWARDS:
            continue
        if ":" not in cfg.reward:
            raise ConfigError(
                f"`tasks.{i}.reward` is `{cfg.reward}`",
                hint=f"{did_you_mean(cfg.reward, OWN_REWARDS)} or a module:function",
            )
        function = import_object(cfg.reward, f"tasks.{i}.reward")
        check_reward(function, f"`tasks.{i}.reward`: `{cfg.reward}`")
    configs = tuple(json.dumps(to_dict(cfg), sort_keys=True, default=str) for cfg in cfgs)
    return TasksetGrader(configs, names_of(cfgs), seed, strict)


def check_reward(function: Any, what: str) -> None:
    """Raises ConfigError, naming `what`, unless `function` can be called with one trajectory."""
    hint = "a reward is a function of one trajectory that returns a number"
    if not callable(function):
        raise ConfigError(f"{what} is not a function: {function!r}", hint=hint)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in functions do not tell
        return
    try:
        signature.bind(None)
    except TypeError as error:
        raise ConfigError(
            f"{what} cannot be called with one trajectory: {error}; it takes {signature}", hint=hint
        ) from None


def _joined(value: Any, scores: Mapping[str, Any]) -> dict[str, Any]:
    """The set's own scores keep their names, whatever the function calls its parts."""
    if isinstance(value, Mapping):
        return {"reward": value.get("score"), **without_own(value), **scores}
    return {**scores, "reward": value}


async def _later(value: Awaitable[Any], scores: Mapping[str, Any]) -> dict[str, Any]:
    return _joined(await value, scores)


def without_own(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Parts that a reward function gave, without names that belong to a task set."""
    return {name: value for name, value in parts.items() if name not in OWN_REWARDS}


def can_grade(taskset: Taskset, task: Task, score: str = "score") -> bool:
    """Whether the task set itself gives this score for answers to the task (not so for a JSONL
    row without `answer`)."""
    if score == "score" and taskset.gold(task) is not None:
        return True
    try:
        return score in taskset.grade(task, "")
    except RewardError:
        return False


def require_gradable(cfg: TasksConfig, taskset: Taskset, tasks: Sequence[Task]) -> int:
    """How many of these tasks the reward of `cfg` cannot judge; a function judges them all.

    Raises:
        ConfigError: it can judge none of them.
    """
    if cfg.reward not in OWN_REWARDS:
        return 0
    lacking = sum(not can_grade(taskset, task, cfg.reward) for task in tasks)
    if tasks and lacking == len(tasks):
        has = "an `answer` to grade against" if cfg.reward == "score" else f"a `{cfg.reward}` score"
        raise ConfigError(
            f"none of the {lacking} tasks of {taskset.name} that were looked at in split "
            f"`{tasks[0].split}` has {has}: reward `{cfg.reward}` judges nothing",
            hint="give the rows an `answer`, or judge them by a function: "
            + setting("tasks.N.reward=module:function"),
        )
    return lacking


@functools.lru_cache(maxsize=64)
def _opened(config: str, name: str, seed: int) -> tuple[Taskset, str]:
    cfg = TasksConfig(**json.loads(config))
    if cfg.reward not in OWN_REWARDS:
        import_object(cfg.reward, "tasks.reward")
    return open_taskset(cfg, seed, name=name, for_grading=True), cfg.reward


def _scores(taskset: Taskset, reward: str, trajectory: Trajectory) -> dict[str, Any]:
    """The set's own scores, each checked; none for a row that only a function can grade."""
    if reward not in OWN_REWARDS and taskset.gold(trajectory.task) is None:
        try:
            scores = taskset.grade(trajectory.task, trajectory.answer)
        except RewardError:
            return {}
    else:
        scores = taskset.grade(trajectory.task, trajectory.answer)
    for part, value in scores.items():
        # False for NaN as well.
        if not 0 <= value <= 1:
            raise RewardError(f"task set {taskset.name} scored {part} = {value}, outside of [0, 1]")
    return dict(scores)
