"""Demonstrations from an earlier run: its own rollouts that were judged good enough.

Guarantees: what is learnt are the token ids that the sampler returned, never their text encoded
again; a trajectory is taken only if it was finished (one that a limit cut would teach to be cut)
and judged; two that hold the same tokens are one. Which were chosen is in the provenance, by a
hash over their tokens, so that a run that goes on notices another choice. The order is a shuffle by
(seed, split).

Takes: a run directory. Gives: a Taskset of Demonstrations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from treadle.errors import ConfigError, DataError, RewardError, did_you_mean
from treadle.store import Store
from treadle.store.layout import DATABASE
from treadle.tasks.demonstrations import Demonstration
from treadle.tasks.options import check_options
from treadle.tasks.permutation import permute
from treadle.tasks.text import SPLITS
from treadle.types import Group, Node, Party, Provenance, Source, Status, Task, Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutsOptions:
    """Options of a "rollouts:" source."""

    min_reward: float = 1.0
    """Trajectories with a smaller reward are left out."""
    best_of_group: bool = False
    """Of each group only the best that is left; the first of several equal ones."""
    taskset: str = ""
    """Only rollouts of this task set of the run; "" = of all."""


class Rollouts:
    """A Taskset that demonstrates. See the module's text for what is chosen."""

    def __init__(
        self,
        run_dir: str | Path,
        *,
        options: Mapping[str, Any] | None = None,
        seed: int = 0,
        name: str = "",
        for_grading: bool = False,
    ) -> None:
        """Raises ConfigError (options, no run), StoreError (unreadable), DataError (nothing is
        left)."""
        self.run_dir = Path(run_dir)
        self.name = name or f"rollouts:{run_dir}"
        self.options = RolloutsOptions(**check_options(RolloutsOptions, options or {}, self.name))
        self._seed = seed
        self.num_duplicates = 0
        """Chosen trajectories whose tokens an earlier one has."""
        self._chosen: list[tuple[int, str]] = []
        self._sha256 = ""
        self._license = "unknown"
        if not for_grading:
            if not (self.run_dir / DATABASE).is_file():
                raise ConfigError(
                    f"{self.name}: there is no run in {self.run_dir}",
                    hint="name a run directory; `treadle runs list` shows them",
                )
            self._read()

    @property
    def provenance(self) -> Provenance:
        return Provenance(
            source=f"{len(self._chosen)} rollouts of run {self.run_dir.resolve().name}",
            license=self._license,
            sha256=self._sha256,
        )

    def size(self, split: str) -> int:
        return len(self._rows(split))

    def task(self, index: int, split: str = "train") -> Task:
        """The rollout's own task, under the name of the trajectory."""
        rows = self._rows(split)
        if not 0 <= index < len(rows):
            raise IndexError(f"split `{split}` of {self.name} has {len(rows)} tasks, not {index}")
        ordinal, trajectory = rows[permute(index, len(rows), "rollouts", self._seed, split)]
        with Store.open(self.run_dir, readonly=True) as store:
            task = store.task(ordinal)
        return replace(
            task,
            id=f"{task.id}@{trajectory}",
            taskset=self.name,
            data={"trajectory": trajectory, "task": task.id, "of": task.taskset},
            split=split,
        )

    def demonstration(self, task: Task) -> Demonstration:
        with Store.open(self.run_dir, readonly=True) as store:
            trajectory = store.trajectory(task.data["trajectory"])
        return Demonstration(nodes=demonstrated(trajectory))

    def grade(self, task: Task, answer: str) -> Mapping[str, float]:
        raise RewardError(f"task set {self.name} holds demonstrations: nothing grades an answer")

    def gold(self, task: Task) -> str | None:
        return None

    def _rows(self, split: str) -> list[tuple[int, str]]:
        if split not in SPLITS:
            raise DataError(f"{self.name} has no split `{split}`", hint=did_you_mean(split, SPLITS))
        return self._chosen if split == "train" else []

    def _read(self) -> None:
        known: set[bytes] = set()
        rewards: list[float] = []
        total, sets = 0, set[str]()
        digest = sha256()
        with Store.open(self.run_dir, readonly=True) as store:
            self._license = (
                store.info()
                .provenance.get("model", Provenance(source="", license="unknown"))
                .license
            )
            for group in store.groups():
                sets.add(group.task.taskset)
                if self.options.taskset and group.task.taskset != self.options.taskset:
                    continue
                total += len(group.trajectories)
                rewards += [t.reward.value for t in _usable(group) if t.reward.value is not None]
                for trajectory in choose(group, self.options):
                    key = _key(trajectory)
                    if key in known:
                        self.num_duplicates += 1
                        continue
                    known.add(key)
                    digest.update(key)
                    self._chosen.append((group.ordinal, trajectory.id))
        self._sha256 = digest.hexdigest()
        if not self._chosen:
            if not rewards:
                hint = "raise rollout.max_new_tokens of the run that makes them"
                if self.options.taskset and not total:
                    hint = f"of its task sets: {did_you_mean(self.options.taskset, sets)}"
                raise DataError(
                    f"{self.name}: none of {total} rollouts was finished and judged, and one that "
                    "a limit cut would teach to be cut",
                    hint=hint if sets else "the run has made none yet",
                )
            raise DataError(
                f"{self.name}: none of {total} rollouts has a reward of "
                f"{self.options.min_reward:g} or more: the best has {max(rewards):g}",
                hint="lower the option `min_reward`",
            )


def choose(group: Group, options: RolloutsOptions) -> list[Trajectory]:
    """The trajectories of a group that are good enough to be learnt."""
    good = [
        t
        for t in _usable(group)
        if t.reward.value is not None and t.reward.value >= options.min_reward
    ]
    if options.best_of_group and good:
        return [max(good, key=lambda t: t.reward.value or 0.0)]
    return good


def demonstrated(trajectory: Trajectory) -> tuple[Node, ...]:
    """Its nodes as demonstrations: the same ids, of which those that were trained are learnt."""

    def node(of: Node) -> Node:
        learnt = of.source is Source.SAMPLED and of.party is Party.POLICY and any(of.trained)
        blank = len(of.ids)
        return replace(
            of,
            source=Source.DEMONSTRATION if learnt else Source.OBSERVATION,
            trained=of.trained if learnt else (False,) * blank,
            logprobs=(math.nan,) * blank,
            versions=(-1,) * blank,
            entropies=(),
        )

    return tuple(node(of) for of in trajectory.nodes)


def _usable(group: Group) -> list[Trajectory]:
    return [t for t in group.scored if t.status is Status.FINISHED]


def _key(trajectory: Trajectory) -> bytes:
    digest = sha256()
    for node in trajectory.nodes:
        digest.update(repr((node.parent, node.ids, node.trained)).encode())
    return digest.digest()
