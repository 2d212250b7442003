"""Where problems come from: task sets, their splits, their graders, and mixtures of them.

    open_taskset(cfg, seed)     one source: "jsonl:PATH" or "reasoning_gym:FAMILY"; demonstrations
                                are "chat:PATH" and "rollouts:RUN_DIR"
    open_mix(cfgs, seed)        several in given ratios, as one stream indexed by an integer
    validate(taskset)           is it worth training on?

Guarantees: `task(i)` is a pure function of (seed, split, i), so a cursor is an integer; train,
val and test share no text, for any seeds.

Takes: TasksConfig. Gives: Task, and named scores of an answer.
"""

from treadle.tasks.demonstrations import Demonstration, Demonstrations
from treadle.tasks.mix import Mix, names_of, open_mix
from treadle.tasks.open import first, open_taskset
from treadle.tasks.validate import TasksetReport, validate

__all__ = [
    "Demonstration",
    "Demonstrations",
    "Mix",
    "TasksetReport",
    "first",
    "names_of",
    "open_mix",
    "open_taskset",
    "validate",
]
