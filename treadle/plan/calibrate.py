"""What an earlier run says about the next: durations, step time and sizes from its store.

Guarantees: the run is only read. Rollouts that failed or were cancelled have no duration of their
own and are left out. Whole groups stay together, so that what is alike within a group stays so;
where too few are whole, rollouts are taken one by one.

A duration is what the run measured: it includes waiting for the engine, so a plan from a run says
most about runs of about its own concurrency. Training is the `train` and `commit` spans of a step:
publication and checkpoint are in them, and generation may go on through both.

Takes: a run directory. Gives: `Calibration`.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from treadle.errors import DataError
from treadle.plan.durations import Durations, measured, measured_groups
from treadle.store import Store

MIN_ROLLOUTS = 16
"""Fewer say nothing about a tail."""

MIN_GROUPS = 30
"""Whole groups that stand for themselves."""

STATUSES = ("finished", "truncated")
"""Of rollouts that came to their end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    durations: Durations
    train_s: float
    group: int
    batch: int
    concurrency: int
    """(eta + 1) batches: what its admission let run at once."""


def calibrate(run_dir: Path) -> Calibration:
    """Raises DataError where the run has too little to say."""
    with Store.open(run_dir, readonly=True) as store:
        config = store.config()
        groups: dict[int, list[float]] = defaultdict(list)
        for row in store.trajectories():
            if str(row.status) in STATUSES and row.num_sampled > 0 and row.duration_s > 0:
                groups[row.ordinal].append(row.duration_s)
        busy: dict[int, float] = defaultdict(float)
        for span in store.spans():
            if span.stage in ("train", "commit"):
                busy[span.step] += span.duration_s
    rollouts = sum(map(len, groups.values()))
    if rollouts < MIN_ROLLOUTS or not busy:
        raise DataError(
            f"{run_dir} has {rollouts} finished rollouts and {len(busy)} steps, at least "
            f"{MIN_ROLLOUTS} and 1 are needed",
            hint="give --durations and --train-s, or another run",
        )
    size = config.rollout.group_size
    whole = [group for group in groups.values() if len(group) == size]
    durations = (
        measured_groups(whole, f"{run_dir} ({len(whole)} groups)")
        if len(whole) >= MIN_GROUPS
        else measured([s for g in groups.values() for s in g], f"{run_dir} ({rollouts} rollouts)")
    )
    batch = size * config.rollout.groups_per_step
    return Calibration(
        durations=durations,
        train_s=median(busy.values()),
        group=size,
        batch=batch,
        concurrency=batch * (config.schedule.eta + 1),
    )
