"""What a planner is told, and what it answers: the same for the closed form and the simulator.

Guarantees: a workload or a policy that cannot run is refused here, with what to change; every
number of a `Prediction` means the same whoever computed it.

Takes: numbers of a run. Gives: `Workload`, a policy, `Prediction`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from treadle.errors import ConfigError
from treadle.plan.durations import Durations

Places = Literal["rollout", "group"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Rollouts that are generated, and steps that train on them."""

    concurrency: int
    """C: rollouts at once."""
    group_size: int
    """G."""
    groups_per_step: int
    """N; a step trains N * G rollouts."""
    train_s: float
    """T_s: a step from its first to its last moment, publication excluded."""
    durations: Durations
    """Of single rollouts."""
    sync_s: float = 0.0
    """W: a publication while which nothing is generated. One that generation goes on through is
    a part of `train_s`."""
    filtered_frac: float = 0.0
    """f: finished groups that are dropped before they are trained (zero variance, unscored)."""
    places: Places = "rollout"
    """Who holds a place: each rollout its own, or the group all of them until its last returns."""
    in_flight: bool = True
    """Whether rollouts go on across a publication with the new weights, so that later tokens are
    of a later version; otherwise all tokens of a rollout are of the version that it began with.
    Moves the token lag alone."""

    def __post_init__(self) -> None:
        for name in ("concurrency", "group_size", "groups_per_step"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"`{name}` must be >= 1, got {value}")
        for name, low in (("train_s", True), ("sync_s", False)):
            value = getattr(self, name)
            if not (math.isfinite(value) and (value > 0 if low else value >= 0)):
                raise ConfigError(f"`{name}` must be {'>' if low else '>='} 0 s, got {value:g}")
        if not 0 <= self.filtered_frac < 1:
            raise ConfigError(
                f"`filtered_frac` must be >= 0 and < 1, got {self.filtered_frac:g}",
                hint="it is the share of groups that are not trained, e.g. 0.3",
            )
        if self.places == "group" and self.concurrency < self.group_size:
            raise ConfigError(
                f"concurrency {self.concurrency} holds no group of {self.group_size}",
                hint="raise it to the group size or more",
            )

    @property
    def batch(self) -> int:
        """B: rollouts per step."""
        return self.group_size * self.groups_per_step

    @property
    def group_rate(self) -> float:
        """lambda: groups that could be finished and trained per second of generation, with every
        place taken."""
        each = self.durations.mean_s
        if self.places == "group":
            whole = self.concurrency // self.group_size
            rate = whole / self.durations.mean_longest_s(self.group_size)
        else:
            rate = self.concurrency / (self.group_size * each)
        return rate * (1 - self.filtered_frac)

    @property
    def rho(self) -> float:
        """Groups that could be generated over groups that could be trained, per second."""
        return self.group_rate * self.train_s / self.groups_per_step


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueDrop:
    """Places always taken; a full queue loses its oldest group."""

    queue: float = 1.0
    """Capacity in steps' worth of groups; >= 1."""

    def __post_init__(self) -> None:
        _check_queue(self.queue)


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocking:
    """While a finished group finds no place in the queue, no new group starts."""

    queue: float = 1.0

    def __post_init__(self) -> None:
        _check_queue(self.queue)


@dataclass(frozen=True, kw_only=True, slots=True)
class Quota:
    """Admission: at most (eta + 1) * N groups started and not yet published; nothing is lost."""

    eta: int
    max_lag: int | None = None
    """K: the trainer waits for a group that is so old. None = for none."""

    def __post_init__(self) -> None:
        if self.eta < 0:
            raise ConfigError(f"`eta` must be >= 0, got {self.eta}")
        if self.max_lag is not None and self.max_lag < self.eta:
            raise ConfigError(
                f"`max_lag` must be >= eta = {self.eta}, got {self.max_lag}",
                hint=f"eta paces, max_lag bounds: {2 * self.eta} is usual for eta = {self.eta}",
            )


BufferPolicy = QueueDrop | Blocking | Quota


def capacity(queue: float, groups_per_step: int) -> int:
    """Groups that a queue of so many steps holds."""
    return max(groups_per_step, math.floor(queue * groups_per_step + 1e-9))


def _check_queue(queue: float) -> None:
    if not 1 <= queue < math.inf:
        raise ConfigError(
            f"`queue` must be >= 1, got {queue:g}",
            hint="it is in steps: a queue that holds no whole step never fills one",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What a run will measure, per trained group or step, once it has settled."""

    mean_lag: float
    """Of a group: publications between its first rollout's start and the start of its training."""
    p95_lag: float
    """95 of 100 trained groups are not older."""
    token_lag: float
    """Publications between a token's sampling and its training, mean over trained tokens; tokens
    of a rollout are taken to be evenly spaced."""
    step_period_s: float
    """T: from one training to the next, publication included."""
    trainer_utilization: float
    """train_s over the period."""
    sampler_utilization: float
    """Share of the places' time in which a rollout is going on."""
    rho: float
    dropped_frac: float
    """Of the groups that were finished and not filtered, those thrown away by a full queue."""
    generate_s: float
    """First start to last end of a trained group."""
    wait_s: float
    """From there to the start of its training."""
    idle_s: float
    """From the last publication to the start of a training."""
    lag_bound: int | None
    """No trained group is ever older; None = nothing bounds it."""
