"""Treadle: an open-weight model plus the tasks of one domain becomes a better model.

    import treadle as td

    run = td.train(model="smollm2-135m", tasks="data/tasks.jsonl", steps=60)
    print(run.report())

Importing this package imports no torch; names load on first use.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "Completion": "types",
    "Environment": "types",
    "Group": "types",
    "Message": "types",
    "Observation": "types",
    "Reward": "types",
    "Sampler": "types",
    "Task": "types",
    "Taskset": "types",
    "Trajectory": "types",
    "RunConfig": "config",
    "ModelConfig": "config",
    "LoraConfig": "config",
    "TasksConfig": "config",
    "RolloutConfig": "config",
    "LearnConfig": "config",
    "ScheduleConfig": "config",
    "EvalConfig": "config",
    "StoreConfig": "config",
    "TreadleError": "errors",
    "Run": "api",
    "open_run": "sessions",
}

_VERBS = ("train", "reward")

if TYPE_CHECKING:
    from treadle.api import Run, reward, train
    from treadle.config import (
        EvalConfig,
        LearnConfig,
        LoraConfig,
        ModelConfig,
        RolloutConfig,
        RunConfig,
        ScheduleConfig,
        StoreConfig,
        TasksConfig,
    )
    from treadle.errors import TreadleError
    from treadle.sessions import open_run
    from treadle.types import (
        Completion,
        Environment,
        Group,
        Message,
        Observation,
        Reward,
        Sampler,
        Task,
        Taskset,
        Trajectory,
    )

__all__ = [
    "Completion",
    "Environment",
    "EvalConfig",
    "Group",
    "LearnConfig",
    "LoraConfig",
    "Message",
    "ModelConfig",
    "Observation",
    "Reward",
    "RolloutConfig",
    "Run",
    "RunConfig",
    "Sampler",
    "ScheduleConfig",
    "StoreConfig",
    "Task",
    "TasksConfig",
    "Taskset",
    "Trajectory",
    "TreadleError",
    "__version__",
    "open_run",
    "reward",
    "train",
]


class _CallableRoom(ModuleType):
    """The module of a room whose name is also a verb of the public API.

    `treadle.train` and `treadle.reward` are rooms, and users write `td.train(...)` and
    `@td.reward`. Importing a room binds its module to the package's attribute, so the module
    itself must answer the call; docs/adr/0001-callable-rooms.md weighs the alternatives.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        verb = self.__name__.rpartition(".")[2]
        return getattr(importlib.import_module("treadle.api"), verb)(*args, **kwargs)


class _Package(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        if name in _VERBS and isinstance(value, ModuleType):
            value.__class__ = _CallableRoom
        super().__setattr__(name, value)


def __getattr__(name: str) -> Any:
    if name in _VERBS:
        if name == "train":  # imports torch, whose threads are tuned before or never
            importlib.import_module("treadle.machine").tune()
        return importlib.import_module(f"treadle.{name}")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'treadle' has no attribute {name!r}")
    return getattr(importlib.import_module(f"treadle.{home}"), name)


def __dir__() -> list[str]:
    return __all__


sys.modules[__name__].__class__ = _Package
