"""Several task sets in given ratios, as one stream indexed by an integer.

Guarantees, each a pure function of (ratios, seed, ordinal), so that a run's cursor is one number:

- after any number of draws each task set has had its share to within one draw;
- a task set is walked in its own order, each task once, before any comes again; then it is
  walked again in an order shuffled by (seed, epoch), and so on.

The share is kept by Tijdeman's rule rather than by "largest deficit", which for three and more
sets can fall more than one draw behind.

Takes: task sets and ratios. Gives: the task of an ordinal, and where it came from.

Source: R. Tijdeman, The chairman assignment problem (Discrete Mathematics 32, 1980): among the
    sets that are at least 1 / (2k - 2) of a draw behind after this one, take the one whose
    deadline is first; no count is then off by more than 1 - 1 / (2k - 2).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import gcd, lcm

from treadle.config import TasksConfig
from treadle.errors import ConfigError
from treadle.tasks.open import open_taskset
from treadle.tasks.permutation import permute
from treadle.types import Task, Taskset

MAX_DENOMINATOR = 10_000
"""Ratios are read as fractions of at most this denominator, so that counting is exact."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Where the task of an ordinal comes from."""

    source: int
    """Index of the task set."""
    visit: int
    """How many draws that task set has had before this one."""
    epoch: int
    """How many times its tasks have all been visited before."""
    index: int
    """Index of the task in its set and split."""


class Mix:
    """A stream of tasks over task sets. `task(ordinal)` may be called in any order."""

    def __init__(
        self,
        tasksets: Sequence[Taskset],
        ratios: Sequence[float] | None = None,
        *,
        seed: int = 0,
        split: str = "train",
    ) -> None:
        """A task set of ratio 0 is in `tasksets` and never drawn.

        Raises ConfigError: no task set, one name twice, a ratio below 0, or all of them 0.
        """
        self.tasksets = tuple(tasksets)
        self.split = split
        self._seed = seed
        ratios = [1.0] * len(self.tasksets) if ratios is None else list(ratios)
        names = [t.name for t in self.tasksets]
        if not names or len(names) != len(ratios):
            raise ConfigError(f"a mix needs task sets, each with a ratio; got {names} and {ratios}")
        if len(set(names)) != len(names):
            raise ConfigError(f"two task sets of a mix have the same name: {names}")
        self._drawn = [i for i, ratio in enumerate(ratios) if ratio != 0]
        if not self._drawn:
            raise ConfigError(
                f"every task set of the mix has ratio 0: {', '.join(names)}; nothing is trained on",
                hint="give one a ratio above 0",
            )
        self._weights = weights([ratios[i] for i in self._drawn])
        self._order: list[tuple[int, int]] = []
        self._counts = [0] * len(self._drawn)
        self._lock = threading.Lock()

    def __getitem__(self, name: str) -> Taskset:
        """The task set of that name. Raises KeyError."""
        for taskset in self.tasksets:
            if taskset.name == name:
                return taskset
        raise KeyError(name)

    def draw(self, ordinal: int) -> tuple[int, int]:
        """(task set, visit) of an ordinal, without looking at a task."""
        with self._lock:
            # After sum(weights) draws every count is exact and the pattern starts again.
            period = sum(self._weights)
            while len(self._order) <= min(ordinal, period - 1):
                place = choose(self._weights, self._counts)
                self._order.append((place, self._counts[place]))
                self._counts[place] += 1
            rounds, rest = divmod(ordinal, period)
            place, visit = self._order[rest]
        return self._drawn[place], visit + rounds * self._weights[place]

    def locate(self, ordinal: int) -> Slot:
        """Where the task of `ordinal` comes from."""
        return self._find(ordinal)[0]

    def task(self, ordinal: int) -> Task:
        """The task of `ordinal` >= 0. Raises what the task set raises; never IndexError."""
        return self._find(ordinal)[1]

    def _find(self, ordinal: int) -> tuple[Slot, Task]:
        return self.visit(*self.draw(ordinal))

    def visit(self, source: int, visit: int) -> tuple[Slot, Task]:
        """What a task set gives to its `visit`-th draw. Raises as `task`."""
        taskset = self.tasksets[source]
        try:
            return Slot(source, visit, 0, visit), taskset.task(visit, self.split)
        except IndexError:
            # Past the end of the first walk. Asking for the task first, not for the size,
            # leaves sources that cannot count themselves cheaply uncounted.
            size = taskset.size(self.split)
        if not size:
            raise ConfigError(
                f"task set {taskset.name} ended at task {visit} of split `{self.split}` and "
                f"gives its size as {size}"
            )
        epoch, place = divmod(visit, size)
        index = permute(place, size, "mix", self._seed, source, epoch)
        return Slot(source, visit, epoch, index), taskset.task(index, self.split)


def weights(ratios: Sequence[float]) -> tuple[int, ...]:
    """The smallest integers in the given ratios. Raises ConfigError unless all are positive."""
    fractions = []
    for ratio in ratios:
        share = Fraction(ratio).limit_denominator(MAX_DENOMINATOR) if 0 < ratio < 1e9 else 0
        if share <= 0:
            raise ConfigError(
                f"a ratio must be between 1/{MAX_DENOMINATOR} and 1e9, got {ratio} in {ratios}"
            )
        fractions.append(Fraction(share))
    unit = lcm(*(f.denominator for f in fractions))
    whole = [int(f * unit) for f in fractions]
    return tuple(number // gcd(*whole) for number in whole)


def choose(weight: Sequence[int], counts: Sequence[int]) -> int:
    """The task set of the next draw, given how many draws each has had (Tijdeman's rule)."""
    if len(weight) == 1:
        return 0
    total, after, slack = sum(weight), sum(counts) + 1, 2 * len(weight) - 2
    # In units of 1 / (total * slack) of a draw, so that the comparison is exact.
    behind = [slack * (w * after - total * c) for w, c in zip(weight, counts, strict=True)]
    return min(
        (k for k in range(len(weight)) if behind[k] >= total),
        key=lambda k: Fraction((slack - 1) * total - behind[k], weight[k]),
    )


def names_of(cfgs: Sequence[TasksConfig]) -> tuple[str, ...]:
    """The name of each configured task set: its source, with #2, #3 ... when it comes again."""
    seen: dict[str, int] = {}
    names = []
    for cfg in cfgs:
        seen[cfg.source] = seen.get(cfg.source, 0) + 1
        number = seen[cfg.source]
        names.append(cfg.source if number == 1 else f"{cfg.source}#{number}")
    return tuple(names)


def open_mix(cfgs: Sequence[TasksConfig], seed: int, split: str = "train") -> Mix:
    """All configured task sets as one stream. Raises as `open_taskset`; ConfigError for none."""
    if not cfgs:
        raise ConfigError(
            "no task set is configured: `tasks` is empty",
            hint="e.g. TasksConfig(source='jsonl:data/tasks.jsonl')",
        )
    for i, cfg in enumerate(cfgs):
        for j in range(i):
            if (cfg.source, cfg.options, cfg.system) == (
                cfgs[j].source,
                cfgs[j].options,
                cfgs[j].system,
            ):
                raise ConfigError(
                    f"tasks.{j} and tasks.{i} are the same task set {cfg.source}",
                    hint=f"keep one, with ratio {cfgs[j].ratio + cfg.ratio:g}",
                )
    tasksets = [
        open_taskset(cfg, seed, name=name) for cfg, name in zip(cfgs, names_of(cfgs), strict=True)
    ]
    return Mix(tasksets, [cfg.ratio for cfg in cfgs], seed=seed, split=split)
