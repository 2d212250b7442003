"""A run on a virtual clock: the scheduling is the run's, only the work is not done.

    places --rollouts--> groups --finished--> policy --N groups--> trainer --publication--+
      ^                                                                                  |
      +------------------------- admission, versions ------------------------------------+

What decides is `treadle.schedule`: `may_start` and `next_batch` for a quota, `queue` for the
others. What is simulated: a place that a rollout leaves is taken at once by the next one, of the
open group or of a new one; a step takes whole groups, trains for `train_s` and publishes for
`sync_s`, during which generation stands still. Starts are staggered, as real ones are: places open
one after the other over the first mean duration.

Guarantees: the same seed gives the same events. Time stands still during a publication, so that
generation, and with it every lag, does not depend on `sync_s` at all: only periods and waits do.
One group per rollout and step is in memory at once, and about 60 bytes per rollout that started.

Takes: a `Workload` and a policy. Gives: `Simulated`: the same numbers as the closed form, and
every step and group behind them.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treadle.errors import ConfigError
from treadle.plan.durations import Floats
from treadle.plan.workload import Blocking, BufferPolicy, Prediction, Quota, Workload, capacity
from treadle.schedule import Progress, Ready, group_lag, may_start, next_batch
from treadle.schedule.queue import first_batch, may_start_blocking, num_dropped

Ints = NDArray[np.int64]

STEPS, WARMUP = 340, 60
MAX_ROLLOUTS = 50_000_000
"""That one simulation may start; some minutes."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Simulated:
    """A simulated run after its warm-up. Arrays are per trained group, in order of training,
    unless they say otherwise."""

    prediction: Prediction
    max_lag: int
    steps: tuple[tuple[int, ...], ...]
    """Groups that each step trained, numbered in order of their starts."""
    lags: Floats
    durations_s: Floats
    """Of trained rollouts, G per group."""
    offered_s: Floats
    """Of all rollouts of groups that finished in the same time and were not filtered."""
    phi: float
    """What the identity of `staleness.identity_lag` leaves: 1/2 for free places, 0 for a quota
    that binds."""


def simulate(
    workload: Workload,
    policy: BufferPolicy,
    *,
    steps: int = STEPS,
    warmup: int = WARMUP,
    seed: int = 0,
) -> Simulated:
    """Run until `warmup + steps` steps have begun; the first `warmup` are left out.

    Raises ConfigError when that would take more rollouts than a person waits for.
    """
    if steps < 2 or warmup < 0:
        raise ConfigError(f"`steps` must be >= 2 and `warmup` >= 0, got {steps}, {warmup}")
    expected = (warmup + steps) * workload.batch / (1 - workload.filtered_frac)
    if not isinstance(policy, Quota | Blocking):
        expected *= max(1.0, workload.rho)
    if expected > MAX_ROLLOUTS:
        raise ConfigError(
            f"{expected:,.0f} rollouts would be simulated, at most {MAX_ROLLOUTS:,} are",
            hint="fewer steps, or a smaller batch and concurrency in the same proportion",
        )
    return _Simulation(workload, policy, seed).run(warmup + steps).result(warmup)


class _Quota:
    """Finished groups under admission, as `loop` keeps them."""

    def __init__(self, workload: Workload, policy: Quota) -> None:
        self.n, self.eta = workload.groups_per_step, policy.eta
        self.max_lag = math.inf if policy.max_lag is None else policy.max_lag
        self.started = self.dropped = self.published = 0
        self.running: dict[int, Ready] = {}
        self.ready: dict[int, Ready] = {}

    def may_start(self) -> bool:
        progress = Progress(started=self.started, dropped=self.dropped, published=self.published)
        return may_start(progress, groups_per_step=self.n, eta=self.eta)

    def start(self, group: int, version: int) -> None:
        self.started += 1
        self.running[group] = Ready(ordinal=group, version=version)

    def finish(self, group: int, *, filtered: bool) -> None:
        ready = self.running.pop(group)
        if filtered:
            self.dropped += 1
        else:
            self.ready[group] = ready

    def batch(self, version: int) -> tuple[int, ...] | None:
        found = next_batch(
            self.ready.values(),
            self.running.values(),
            groups_per_step=self.n,
            version=version,
            max_lag=self.max_lag,
        )
        for group in found or ():
            del self.ready[group]
        return found

    def publish(self) -> None:
        self.published += self.n


class _Queue:
    """Finished groups in a bounded queue that drops or blocks."""

    def __init__(self, workload: Workload, queue: float, *, blocks: bool) -> None:
        self.n, self.blocks = workload.groups_per_step, blocks
        self.capacity = capacity(queue, self.n)
        self.finished: deque[int] = deque()
        self.lost: list[int] = []

    def may_start(self) -> bool:
        return not self.blocks or may_start_blocking(len(self.finished), capacity=self.capacity)

    def start(self, group: int, version: int) -> None:
        pass

    def finish(self, group: int, *, filtered: bool) -> None:
        if filtered:
            return
        self.finished.append(group)
        if not self.blocks:
            for _ in range(num_dropped(len(self.finished), capacity=self.capacity)):
                self.lost.append(self.finished.popleft())

    def batch(self, version: int) -> tuple[int, ...] | None:
        found = first_batch(self.finished, groups_per_step=self.n)
        for _ in found or ():
            self.finished.popleft()
        return found

    def publish(self) -> None:
        pass


class _Simulation:
    def __init__(self, workload: Workload, policy: BufferPolicy, seed: int) -> None:
        self.workload, self.policy = workload, policy
        self.buffer = (
            _Quota(workload, policy)
            if isinstance(policy, Quota)
            else _Queue(workload, policy.queue, blocks=isinstance(policy, Blocking))
        )
        self.rng = np.random.default_rng(seed)
        self.drawn: list[float] = []
        self.cursor = 0
        """Of the next rollout in `drawn`."""
        self.start_s: list[float] = []
        """Of each rollout, in order; rollout i is of group i // G."""
        self.version: list[int] = []
        """Of each group, at its first start."""
        self.left: list[int] = []
        """Rollouts of each group that have not ended."""
        self.done_s: list[float] = []
        """Of each group; nan while it is generated."""
        self.filtered: list[bool] = []
        self.published_s: list[float] = []
        self.steps: list[tuple[float, tuple[int, ...]]] = []

    def run(self, steps: int) -> _Simulation:
        workload, buffer = self.workload, self.buffer
        size, train_s, whole = workload.group_size, workload.train_s, workload.places == "group"
        num_places = workload.concurrency // size * size if whole else workload.concurrency
        stagger = workload.durations.mean_s / num_places
        # (end, group); a place that opens is the end of a rollout of no group.
        heap = [(i * stagger, -1) for i in range(num_places)]
        free = to_start = 0
        """Free places, and rollouts that the newest group has yet to start."""
        start_s, left, done_s = self.start_s, self.left, self.done_s
        version, trained_s = 0, math.inf
        """Now served; when the trainer is done, inf = it waits for a batch."""
        while True:
            if heap and heap[0][0] < trained_s:
                now, group = heapq.heappop(heap)
                news = False
                if group < 0:
                    free += 1
                else:
                    left[group] -= 1
                    ended = left[group] == 0
                    free += 0 if whole else 1
                    if ended:
                        done_s[group] = now
                        buffer.finish(group, filtered=self.filtered[group])
                        free += size if whole else 0
                        news = True
            elif trained_s < math.inf:
                now, trained_s, news = trained_s, math.inf, True
                self.published_s.append(now)
                version += 1
                buffer.publish()
            else:
                raise AssertionError("nothing runs and nothing can be trained: a deadlock")
            if news and trained_s == math.inf:
                batch = buffer.batch(version)
                if batch is not None:
                    self.steps.append((now, batch))
                    if len(self.steps) == steps:
                        return self
                    trained_s = now + train_s
            while free:
                if not to_start:
                    if (whole and free < size) or not buffer.may_start():
                        break
                    group = self._open(now, version)
                    to_start = size
                start_s.append(now)
                heapq.heappush(heap, (now + self.drawn[self.cursor], len(left) - 1))
                self.cursor += 1
                free -= 1
                to_start -= 1

    def _open(self, now: float, version: int) -> int:
        """A new group begins now."""
        workload, group = self.workload, len(self.left)
        if self.cursor == len(self.drawn):
            rows = max(1, 4096 // workload.group_size)
            self.drawn += (
                workload.durations.draw(self.rng, rows, workload.group_size).ravel().tolist()
            )
            self.filtered += (self.rng.random(rows) < workload.filtered_frac).tolist()
        self.version.append(version)
        self.left.append(workload.group_size)
        self.done_s.append(math.nan)
        self.buffer.start(group, version)
        return group

    def result(self, warmup: int) -> Simulated:
        workload, size = self.workload, self.workload.group_size
        groups = np.array([g for _, batch in self.steps[warmup:] for g in batch])
        step_s = np.array([s for s, _ in self.steps])
        trained_at = np.repeat(np.arange(warmup, len(self.steps)), workload.groups_per_step)
        versions = self.version
        lags = np.array(
            [
                group_lag(versions[g], training_version=int(v))
                for g, v in zip(groups, trained_at, strict=True)
            ],
            dtype=np.float64,
        )
        start_s, done_s = np.array(self.start_s), np.array(self.done_s)
        published = np.array(self.published_s)
        measured_s = float(step_s[-1] - step_s[warmup])
        period_s = measured_s / (len(step_s) - 1 - warmup)

        begun = start_s[groups * size]
        generate, wait = done_s[groups] - begun, step_s[trained_at] - done_s[groups]
        since = np.concatenate([[0.0], published])[np.arange(warmup, len(step_s))]
        idle = float((step_s[warmup:] - since).mean())
        phi = float(lags.mean() - (generate.mean() + wait.mean() - idle) / period_s)

        rollouts = (groups[:, None] * size + np.arange(size)).ravel()
        seconds = np.array(self.drawn[: len(start_s)])
        trained_s = seconds[rollouts]
        token_lag = self._token_lag(rollouts, trained_s, np.repeat(trained_at, size), published)

        busy = np.minimum(start_s + seconds, step_s[-1]) - np.maximum(start_s, step_s[warmup])
        places = workload.concurrency * (measured_s + workload.sync_s * (len(step_s) - 1 - warmup))
        finished = np.flatnonzero((done_s >= step_s[warmup]) & (done_s <= step_s[-1]))
        offered = finished[~np.array(self.filtered[: len(done_s)], dtype=bool)[finished]]
        lost = np.array(self.buffer.lost if isinstance(self.buffer, _Queue) else [], dtype=int)
        num_lost = int(np.isin(lost, offered).sum())

        wall = _Wall(published, workload.sync_s)
        period_w = period_s + workload.sync_s
        generate_w = wall.of(done_s[groups]) - wall.of(begun)
        wait_w = wall.of(step_s[trained_at]) - wall.of(done_s[groups])
        bound = self.policy.max_lag if isinstance(self.policy, Quota) else None
        prediction = Prediction(
            mean_lag=float(lags.mean()),
            p95_lag=float(np.quantile(lags, 0.95, method="inverted_cdf")),
            token_lag=token_lag,
            step_period_s=period_w,
            trainer_utilization=workload.train_s / period_w,
            sampler_utilization=float(np.maximum(busy, 0).sum()) / places,
            rho=workload.rho,
            dropped_frac=num_lost / max(1, len(offered)),
            generate_s=float(generate_w.mean()),
            wait_s=float(wait_w.mean()),
            idle_s=idle,
            lag_bound=bound,
        )
        return Simulated(
            prediction=prediction,
            max_lag=int(lags.max()),
            steps=tuple(batch for _, batch in self.steps[warmup:]),
            lags=lags,
            durations_s=trained_s,
            offered_s=seconds[(offered[:, None] * size + np.arange(size)).ravel()],
            phi=phi,
        )

    def _token_lag(
        self, rollouts: Ints, seconds: Floats, trained_at: Ints, published: Floats
    ) -> float:
        """Mean over trained tokens, as many per second in every rollout."""
        begun = np.array(self.start_s)[rollouts]
        if self.workload.in_flight:
            # The mean version over [a, b] is the integral of the version there over b - a.
            total = np.concatenate([[0.0], np.cumsum(published)])

            def integral(t: Floats) -> Floats:
                before = np.searchsorted(published, t, side="right")
                return before * t - total[before]

            versions = integral(begun + seconds) - integral(begun)
        else:
            versions = np.searchsorted(published, begun, side="right") * seconds
        return float((trained_at * seconds - versions).sum() / seconds.sum())


class _Wall:
    """From time that stands still during publications to time that does not."""

    def __init__(self, published: Floats, sync_s: float) -> None:
        self.published, self.sync_s = published, sync_s

    def of(self, t: Floats) -> Floats:
        return t + self.sync_s * np.searchsorted(self.published, t, side="right")
