"""From a config to a task set: "jsonl:PATH", "reasoning_gym:FAMILY", "chat:PATH", "rollouts:RUN".

Takes: TasksConfig. Gives: Taskset. Raises: ConfigError, DataError.
"""

from __future__ import annotations

import contextlib

from treadle.config import TasksConfig
from treadle.errors import ConfigError, DataError, did_you_mean
from treadle.tasks.chat import Chat
from treadle.tasks.jsonl import Jsonl
from treadle.tasks.reasoning_gym import ReasoningGym
from treadle.tasks.rollouts import Rollouts
from treadle.types import Task, Taskset

SOURCES = ("jsonl", "reasoning_gym", "chat", "rollouts")


def open_taskset(
    cfg: TasksConfig, seed: int, *, name: str = "", for_grading: bool = False
) -> Taskset:
    """The task set that a config names, in the order that `seed` gives.

    Args:
        cfg: `source`, `options` and `system` are read; ratio and reward are not.
        seed: Of the run. It changes the order (and which items a generator makes), never the
            split of a text: train tasks of one seed and test tasks of another share no text.
        name: `Task.taskset`; the source when empty.
        for_grading: Only `grade` and `gold` will be called: a file is not read.

    Raises:
        ConfigError: unknown source, family or option; an option of the wrong type.
        DataError: a row of the file cannot be used, named by file and line; no rows at all.
    """
    kind, colon, rest = cfg.source.partition(":")
    if kind not in SOURCES or not colon or not rest:
        raise ConfigError(_what_is_wrong(cfg.source), hint=_hint(cfg.source, kind))
    if kind == "rollouts":
        if cfg.system:
            raise ConfigError(
                f"`tasks.system` is set, but {cfg.source} holds rollouts, which are learnt as they "
                "were sampled",
                hint="leave it out; learn.teacher.system shows a message to a teacher alone",
            )
        return Rollouts(rest, options=cfg.options, seed=seed, name=name, for_grading=for_grading)
    if kind in ("jsonl", "chat"):
        return (Jsonl if kind == "jsonl" else Chat)(
            rest,
            options=cfg.options,
            system=cfg.system,
            seed=seed,
            name=name,
            for_grading=for_grading,
        )
    return ReasoningGym(rest, options=cfg.options, system=cfg.system, seed=seed, name=name)


def first(taskset: Taskset, split: str, count: int) -> list[Task]:
    """The first `count` tasks of a split, all distinct by text: what an eval asks for.

    Raises:
        DataError: the split holds fewer, with the numbers.
    """
    tasks: list[Task] = []
    with contextlib.suppress(IndexError):
        for index in range(count):
            tasks.append(taskset.task(index, split))
    if len(tasks) < count:
        raise DataError(
            f"{count} distinct questions are wanted from split `{split}` of {taskset.name}, "
            f"which has {len(tasks)}",
            hint="ask for fewer, or widen the options of the task set",
        )
    return tasks


def _what_is_wrong(source: str) -> str:
    if not source:
        return "no task set is named: `tasks.source` is empty"
    return f"`{source}` is not a task source"


def _hint(source: str, kind: str) -> str:
    forms = (
        "write `jsonl:PATH` or `reasoning_gym:FAMILY`; demonstrations are `chat:PATH` or "
        "`rollouts:RUN_DIR`"
    )
    if source.endswith((".jsonl", ".json")):
        return f"write `jsonl:{source}`"
    return f"{did_you_mean(kind, SOURCES)} {forms}" if kind else forms
