"""Which task comes at an ordinal: ratios and minima between task sets, curricula within one.

    by ratio alone     a pure function of the ordinal; nothing is waited for
    with a minimum     eta = 0: places of the step that is being filled are kept for sets that have
                       fewer than their minimum; a place that a dropped group gives back is drawn
                       anew. A draw waits until enough earlier groups, in order of their ordinals,
                       have finished that there is a place.
                       eta > 0: the same over every N ordinals, as if no group were dropped
    with a curriculum  the set's tasks by pass rate; a draw waits for the groups whose outcome it
                       sees (`schedule/curriculum.py`)

Guarantees:
- the task of an ordinal is a function of config, seed and of how *earlier ordinals* ended, never of
  when: a killed run that is resumed draws what it would have drawn;
- at eta = 0 every step has the minimum of each set that still has tasks; else, and between the
  places that are kept, shares follow the ratios to within one draw;
- a set whose curriculum has retired every task gives its draws to the others; that all have is a
  DataError;
- a draw that waits waits for groups that are running, so it ends when they do.

Takes: a Mix, TasksConfigs, how groups ended. Gives: the Task of an ordinal; metrics by task set.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from treadle.config import TasksConfig
from treadle.errors import ConfigError, ContractError, DataError
from treadle.schedule.curriculum import Curriculum, Outcome
from treadle.store import PromptRow, TrajectoryRow
from treadle.tasks.mix import Mix, choose, weights
from treadle.types import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How a group ended."""

    dropped: bool
    """Its place was given back, before a step consumed it."""
    passed: int = 0
    scored: int = 0
    """Rollouts that count."""


@dataclass
class _Lesson:
    """A task set with a curriculum."""

    rule: Curriculum
    size: int
    seed: int
    indices: list[int] = field(default_factory=list)
    """Of the task of each visit."""
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    """By visit."""
    finished: int = 0
    """Visits 0..finished-1 have an outcome."""
    block: int = -1
    order: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """Of this block."""
    retired: set[int] = field(default_factory=set)
    exhausted: bool = False


@dataclass
class _Window:
    """The step that is being filled."""

    begin: int = 0
    """Its first ordinal."""
    seen: int = 0
    """The ends of ordinals below this one are taken into account."""
    dropped: int = 0
    """Of those that are seen."""
    have: list[int] = field(default_factory=list)
    """Groups by task set that are drawn for it, and not seen to be dropped."""


class Draws:
    """The task stream of a run. Ordinals are drawn in order; `ended` may come in any order."""

    def __init__(
        self,
        mix: Mix,
        cfgs: Sequence[TasksConfig] = (),
        *,
        groups_per_step: int = 1,
        eta: int = 0,
        seed: int = 0,
    ) -> None:
        """
        Args:
            cfgs: of the mix's task sets in their order; () = `mix` alone decides.

        Raises ConfigError: a curriculum's rates make no sense, or its set cannot be counted.
        """
        self._mix, self._eta, self._places = mix, eta, groups_per_step
        self._minima = [cfg.minimum for cfg in cfgs]
        self._lessons: dict[int, _Lesson] = {}
        for source, cfg in enumerate(cfgs):
            if cfg.curriculum is None:
                continue
            name, size = mix.tasksets[source].name, mix.tasksets[source].size(mix.split)
            if not size:
                raise ConfigError(
                    f"`tasks.{source}.curriculum` needs a task set that can be counted, and {name} "
                    "has more tasks than that",
                    hint="leave the curriculum out, or narrow the options of the task set",
                )
            # A block is at least what is in flight: then a draw hardly ever waits.
            rule = Curriculum(block=(eta + 1) * groups_per_step, **asdict(cfg.curriculum))
            key = blake2b(f"{seed}/{source}".encode(), digest_size=8).digest()
            self._lessons[source] = _Lesson(rule, size, int.from_bytes(key, "big"))
        self.plain = not (any(self._minima) or self._lessons)
        """`mix` alone decides."""
        self._drawn = [s for s, cfg in enumerate(cfgs) if cfg.ratio > 0]
        of_drawn = weights([cfgs[s].ratio for s in self._drawn]) if self._drawn else ()
        self._weights = dict(zip(self._drawn, of_drawn, strict=True))
        """By task set; those that are only evaluated have none."""
        self._counts = [0] * len(cfgs)
        self._slots: list[tuple[int, int]] = []
        """Task set and visit of each ordinal."""
        self._ended: dict[int, bool] = {}
        """Whether dropped, by ordinal."""
        self._window = _Window(have=[0] * len(cfgs))

    # ------------------------------------------------------------------ what happened

    def ended(self, ordinal: int, how: Ended) -> None:
        """A drawn group was judged; it is stored."""
        if self.plain:
            return
        self._ended[ordinal] = how.dropped
        source, visit = self._slots[ordinal]
        lesson = self._lessons.get(source)
        if lesson is None:
            return
        index = lesson.indices[visit]
        lesson.outcomes[visit] = Outcome(index=index, passed=how.passed, scored=how.scored)
        while lesson.finished in lesson.outcomes:
            lesson.finished += 1
        if how.scored and how.passed / how.scored >= lesson.rule.retire:
            lesson.retired.add(index)

    def replay(self, prompts: Iterable[PromptRow], trajectories: Iterable[TrajectoryRow]) -> None:
        """Everything that a stored run has drawn, in order of the ordinals.

        Raises ContractError: the run drew another task set at an ordinal.
        """
        if self.plain:
            return
        counts: dict[int, tuple[int, int]] = {}
        for row in trajectories:
            passed, scored = counts.get(row.ordinal, (0, 0))
            counts[row.ordinal] = (passed + row.passed, scored + row.scored)
        for prompt in prompts:
            if not self.ready(prompt.ordinal):
                raise ContractError(
                    f"the stored run drew ordinal {prompt.ordinal} before the groups had ended "
                    "that decide it"
                )
            name = self._mix.tasksets[self._slots[prompt.ordinal][0]].name
            if name != prompt.taskset:
                raise ContractError(
                    f"ordinal {prompt.ordinal} was of task set {prompt.taskset} before the crash "
                    f"and is of {name} now: draws are not a function of what is stored",
                )
            if prompt.state in ("published", "trained", "dropped"):
                passed, scored = counts.get(prompt.ordinal, (0, 0))
                dropped = prompt.state == "dropped"
                self.ended(prompt.ordinal, Ended(dropped=dropped, passed=passed, scored=scored))

    # ------------------------------------------------------------------ what comes

    def ready(self, ordinal: int) -> bool:
        """Whether the task of `ordinal` is decided; earlier ones are. Cheap.

        Raises DataError: every task set has retired all of its tasks.
        """
        if self.plain or ordinal < len(self._slots):
            return True
        if ordinal != len(self._slots):
            raise ContractError(f"ordinal {ordinal} was drawn after {len(self._slots) - 1}")
        if not self._place(ordinal):
            return False
        while True:
            source = self._source(ordinal)
            visit = self._counts[source]
            lesson = self._lessons.get(source)
            if lesson is None:
                break
            if lesson.finished < lesson.rule.horizon(visit):
                return False
            if (index := _draw(lesson, visit)) is not None:
                lesson.indices.append(index)
                break
            lesson.exhausted = True
        self._slots.append((source, visit))
        self._counts[source] += 1
        self._window.have[source] += 1
        return True

    def task(self, ordinal: int) -> Task:
        """The task of an ordinal that is `ready`. Raises what the task set raises."""
        if self.plain:
            return self._mix.task(ordinal)
        source, visit = self._slots[ordinal]
        if source not in self._lessons:
            return self._mix.visit(source, visit)[1]
        taskset = self._mix.tasksets[source]
        return taskset.task(self._lessons[source].indices[visit], self._mix.split)

    def minimum(self, taskset: str) -> int:
        """Least groups of a task set, by its name, in a step."""
        of = zip(self._mix.tasksets, self._minima, strict=False)
        return next((least for taken, least in of if taken.name == taskset), 0)

    def retired(self) -> dict[str, int]:
        """Tasks that never come again, by the name of each task set with a curriculum."""
        return {self._mix.tasksets[s].name: len(x.retired) for s, x in self._lessons.items()}

    def _place(self, ordinal: int) -> bool:
        """Whether the step being filled is known to have a place for `ordinal`."""
        window, free = self._window, self._places
        if self._eta or not any(self._minima):
            # As if no group were dropped.
            if ordinal - window.begin >= free:
                self._window = _Window(begin=ordinal, have=[0] * len(self._counts))
            return True
        while ordinal - window.begin - window.dropped >= free:
            dropped = self._ended.get(window.seen)
            if dropped is None:
                return False
            if dropped:
                window.dropped += 1
                window.have[self._slots[window.seen][0]] -= 1
            window.seen += 1
            if window.seen - window.begin - window.dropped == free:
                window = _Window(begin=ordinal, seen=ordinal, have=[0] * len(self._counts))
                self._window = window
        return True

    def _source(self, ordinal: int) -> int:
        """The task set of the next draw."""
        window = self._window
        live = [s for s in self._drawn if not self._is_exhausted(s)]
        if not live:
            num = sum(len(x.retired) for x in self._lessons.values())
            raise DataError(
                f"no task is left to draw: {num} tasks passed and are retired, and the curricula "
                "of all task sets draw no others",
                hint="the run has learnt what its tasks teach: evaluate it, add harder tasks, or "
                "raise tasks.N.curriculum.retire",
            )
        free = self._places - (ordinal - window.begin - window.dropped)
        lack = {s: n for s in live if (n := self._minima[s] - window.have[s]) > 0}
        among = list(lack) if lack and sum(lack.values()) >= free else live
        return among[choose([self._weights[s] for s in among], [self._counts[s] for s in among])]

    def _is_exhausted(self, source: int) -> bool:
        return source in self._lessons and self._lessons[source].exhausted


def _draw(lesson: _Lesson, visit: int) -> int | None:
    block, place = divmod(visit, lesson.rule.block)
    if block != lesson.block:
        lesson.order = lesson.rule.order(lesson.size, lesson.outcomes, visit, lesson.seed)
        lesson.block = block
    return int(lesson.order[place % len(lesson.order)]) if len(lesson.order) else None
