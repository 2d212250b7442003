"""The lag of a run in closed form, before it runs.

Per trained group, in versions and for one publication per step,

    S = (generate + wait - idle) / T + phi

with generate = first start to last end, wait = from there to the start of training, idle = last
publication to the start of training, T = the step period, and phi = 1/2 where groups start whenever
a place is free, 0 where their starts are locked to publications (`identity_lag`). The rest of this
file says what those four are, for each policy.

Guarantees: pure and quick (a fraction of a second), the same answer each time. How far it is from
the simulator is measured by `benchmarks/staleness.py` on 504 settings, and in `tests/plan`.

Takes: a `Workload` and a policy. Gives: a `Prediction`.
Sources: Dong, Goel and Yu, "Predicting and Controlling Staleness in Fully Asynchronous RL
Training" (2026), for the model of free places, a queue in steps and its two limits (`bare_lag`);
reflected Brownian motion with Siegmund's shift of discretely watched barriers (Corrected diffusion
approximations, 1979) for what happens between them; Little's law for quotas.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treadle.plan.durations import Durations, Floats
from treadle.plan.workload import (
    Blocking,
    BufferPolicy,
    Prediction,
    QueueDrop,
    Quota,
    Workload,
    capacity,
)

Ints = NDArray[np.int64]

SHIFT = 0.5826
"""-zeta(1/2) / sqrt(2 pi): how far outside a barrier, in deviations per step, a walk that is
watched once per step is reflected on average."""

DRAWS = 400_000
"""Rollouts drawn for a quantile."""


def identity_lag(
    *, generate_s: float, wait_s: float, idle_s: float, period_s: float, phi: float = 0.5
) -> float:
    """Mean lag from four things that every run measures.

    S counts the publications in a window of length generate + wait that ends `idle` after one of
    them. Publications are `period_s` apart, so S is the ceiling of x = (generate + wait - idle) /
    period: on average x + 1/2 where a window's start is anywhere in its period, x where it is at a
    publication.

    Args:
        phi: 1/2 for places that are always taken, 0 for a quota that binds. Where nothing is
            generated during a publication of W seconds, (1 - W / period) times that.
    """
    return (generate_s + wait_s - idle_s) / period_s + phi


def bare_lag(
    *, concurrency: float, batch: float, queue: float, rho: float, tailness: float
) -> float:
    """Mean lag under queue-drop, far from rho = 1.

        rho < 1    S = C M / B + rho
        rho > 1    S = C M / (rho B) + (2 q + rho - 1) / (2 rho)

    Source: Dong, Goel and Yu (2026). `predict` goes over into it on both sides.
    """
    if rho < 1:
        return concurrency * tailness / batch + rho
    return concurrency * tailness / (rho * batch) + (2 * queue + rho - 1) / (2 * rho)


def predict(workload: Workload, policy: BufferPolicy) -> Prediction:
    """What a run of this workload under this policy settles to."""
    bound = None
    if isinstance(policy, Quota):
        pace, bound = _paced(workload, policy), policy.max_lag
        flow = _quota(workload, policy, pace)
        p95, token_lag = _spread_of_quota(workload, flow, pace, bound)
    else:
        free = isinstance(policy, QueueDrop)
        flow = _queue_drop(workload, policy) if free else _blocking(workload, policy)
        p95, token_lag = _spread(workload, flow)
    period = flow.period_s + workload.sync_s
    stretch = period / flow.period_s
    rate = workload.batch / (1 - workload.filtered_frac) / (1 - flow.dropped_frac)
    held = workload.durations.mean_s
    return Prediction(
        mean_lag=flow.mean_lag,
        p95_lag=p95,
        token_lag=token_lag,
        step_period_s=period,
        trainer_utilization=workload.train_s / period,
        sampler_utilization=min(1.0, rate * held / (workload.concurrency * period)),
        rho=workload.rho,
        dropped_frac=flow.dropped_frac,
        generate_s=flow.generate_s * stretch,
        wait_s=flow.wait_s * stretch,
        idle_s=flow.idle_s,
        lag_bound=bound,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Flow:
    """Where the time of a trained group goes, in seconds of generation: publications left out."""

    mean_lag: float
    period_s: float
    generate_s: float
    idle_s: float
    phi: float
    """1/2 where groups start whenever a place is free, 0 where they start at a publication."""
    left_s: float = 0.0
    """Of the wait, what all groups of a batch have in common: older ones are ahead of them."""
    dropped_frac: float = 0.0

    @property
    def wait_s(self) -> float:
        """What `identity_lag` leaves for it."""
        rest = (self.mean_lag - self.phi) * self.period_s - self.generate_s + self.idle_s
        return max(0.0, rest)


# --------------------------------------------------------------------------- free places


@dataclass(frozen=True, kw_only=True, slots=True)
class _Backlog:
    """Finished groups before a step: a random walk with drift (rho - 1) N and variance
    kappa rho N per step, reflected where N are there and where the queue is full."""

    missing: float
    """Mean number of groups that a trainer which is done still waits for."""
    left: float
    """Mean number that a step leaves behind."""
    fullness: float
    """Mean place of the walk between its barriers, 0 to 1."""


def _backlog(workload: Workload, queue: float) -> _Backlog:
    """For a queue of so many steps, >= 1.

    Doubly reflected Brownian motion: its density is exponential with the exponent x over the room.
    kappa is the exact variance over mean of what finishes in a window, for evenly spaced starts.
    """
    n, rho = workload.groups_per_step, workload.rho
    window_s = queue * max(workload.train_s, n / workload.group_rate)
    kappa = _kappa(workload.durations, workload.group_size, window_s)
    sigma = math.sqrt(kappa * rho * n)
    room = (queue - 1) * n + 2 * SHIFT * sigma
    if sigma * room == 0:  # no randomness: who is faster waits
        x = math.copysign(math.inf, rho - 1) if rho != 1 else 0.0
    else:
        x = 2 * (rho - 1) * room / (kappa * rho)
    if abs(x) < 1e-6:
        missing = sigma**2 / (2 * room) if room else 0.0
    else:
        missing = (rho - 1) * n / math.expm1(x) if x < 700 else 0.0
    left = room * _fullness(x) - SHIFT * sigma
    return _Backlog(
        missing=missing, left=min(max(left, 0.0), (queue - 1) * n), fullness=_fullness(x)
    )


def _fullness(x: float) -> float:
    if abs(x) < 1e-4:
        return 0.5 + x / 12
    if abs(x) > 700:
        return 1 - 1 / x if x > 0 else -1 / x
    return 1 / -math.expm1(-x) - 1 / x


def _kappa(durations: Durations, size: int, window_s: float) -> float:
    """E[min(1, |M1 - M2| / window)] with the times M1, M2 of two independent groups."""
    values, weights = durations.longest(size)
    weights = np.maximum(weights, 0.0)
    # Over pairs below each value: those nearer than the window count their distance, others 1.
    upto = np.concatenate([[0.0], np.cumsum(weights)])
    moment = np.concatenate([[0.0], np.cumsum(weights * values)])
    index = np.arange(len(values))
    near = np.searchsorted(values, values - window_s, side="left")
    distance = values * (upto[index] - upto[near]) - (moment[index] - moment[near])
    return float(min(1.0, 2 * (weights * (distance / window_s + upto[near])).sum()))


def _generate_s(workload: Workload) -> float:
    """First start to last end of a group: its longest rollout, and starts one after the other."""
    longest = workload.durations.mean_longest_s(workload.group_size)
    if workload.places == "group":
        return longest
    return longest + (workload.group_size - 1) / 2 * _stagger_s(workload)


def _stagger_s(workload: Workload) -> float:
    """Between two starts while every place is taken."""
    return workload.durations.mean_s / workload.concurrency


def _queue_drop(workload: Workload, policy: QueueDrop) -> _Flow:
    """Places always taken; a full queue loses its oldest."""
    n, rate = workload.groups_per_step, workload.group_rate
    backlog = _backlog(workload, capacity(policy.queue, n) / n)
    period = workload.train_s + backlog.missing / rate
    generate, idle = _generate_s(workload), period - workload.train_s
    wait = (backlog.left + (n - 1) / 2) / rate
    return _Flow(
        mean_lag=identity_lag(generate_s=generate, wait_s=wait, idle_s=idle, period_s=period),
        period_s=period,
        generate_s=generate,
        idle_s=idle,
        phi=0.5,
        left_s=backlog.left / rate,
        dropped_frac=max(0.0, 1 - n / (period * rate)),
    )


def _blocking(workload: Workload, policy: Blocking) -> _Flow:
    """A queue that nothing leaves untrained. Generation that is slower than training never fills
    it; one that is faster finds it always full, and waits."""
    n, rate = workload.groups_per_step, workload.group_rate
    queue = capacity(policy.queue, n) / n
    backlog = _backlog(workload, queue)
    period = workload.train_s + backlog.missing / rate
    generate, idle = _generate_s(workload), period - workload.train_s
    wait = (backlog.left + (n - 1) / 2) / rate
    free = identity_lag(generate_s=generate, wait_s=wait, idle_s=idle, period_s=period)
    blocked = generate / period + queue + 0.25
    full = backlog.fullness
    return _Flow(
        mean_lag=(1 - full) * free + full * blocked,
        period_s=period,
        generate_s=generate,
        idle_s=idle,
        phi=0.5 - 0.25 * full,
        left_s=(1 - full) * backlog.left / rate + full * (queue - 0.5) * period,
    )


# --------------------------------------------------------------------------- quota


def _quota(workload: Workload, policy: Quota, pace: _Pace) -> _Flow:
    """(eta + 1) N groups at most are started and not published.

    Little's law: with always that many, each spends eta + 1 periods from its start to its
    publication, so the mean lag is eta. Fewer are there only while places run out first: then the
    flow is that of free places, with what is left of the quota for a queue, which blocks.
    """
    n, train_s, eta = workload.groups_per_step, workload.train_s, policy.eta
    rate, generate = workload.group_rate, _generate_s(workload)
    slowest_s = max(train_s, n / rate)
    unqueued = identity_lag(
        generate_s=generate,
        wait_s=(n - 1) / 2 / rate,
        idle_s=slowest_s - train_s,
        period_s=slowest_s,
    )
    room = eta - unqueued
    backlog = _backlog(workload, 1 + max(0.0, room))
    period = max(pace.period_s, train_s + backlog.missing / rate if room > 0 else 0.0)
    free_lag = unqueued + backlog.left / n if room > 0 else float(eta)
    return _Flow(
        mean_lag=min(float(eta), max(pace.mean_lag, free_lag)),
        period_s=period,
        generate_s=generate,
        idle_s=period - train_s,
        phi=0.5 * pace.mean_free if room > 0 else 0.0,
        left_s=backlog.left / rate,
    )


PACED_STEPS = 8000

SPREAD = 16
"""Points of time for which starts of one step's groups stand."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Pace:
    """Steps one by one; the first tenth is left out of means."""

    start_s: Floats
    """Of each N groups, one more than steps."""
    trained_s: Floats
    """Start of each step."""
    published_s: Floats
    free: Floats
    """Of each N groups, the share whose start waited for a place and not for a publication: these
    are spread over the time to the next ones, the others start together."""

    @property
    def skip(self) -> int:
        return len(self.trained_s) // 10

    @property
    def period_s(self) -> float:
        first = self.skip
        span = self.trained_s[-1] - self.trained_s[first]
        return float(span / (len(self.trained_s) - 1 - first))

    @property
    def mean_free(self) -> float:
        return float(self.free[self.skip :].mean())

    @property
    def mean_lag(self) -> float:
        """As many groups are trained as start: how far the version of a start is behind its
        number."""
        c = np.repeat(np.arange(self.skip, len(self.free)), 4)
        at = self.at(c, np.tile([1 / 8, 3 / 8, 5 / 8, 7 / 8], len(c) // 4))
        return max(0.0, float((c - self.version(at)).mean()))

    def at(self, c: Ints, part: Floats) -> Floats:
        """Starts within the c-th N groups, `part` of the way to the last of them."""
        gap = self.start_s[c + 1] - self.start_s[c]
        return self.start_s[c] + part * self.free[c] * gap

    def version(self, at: Floats) -> Ints:
        return np.searchsorted(self.published_s, at, side="right")


def _paced(workload: Workload, policy: Quota) -> _Pace:
    """What a quota and waiting for groups that are max_lag old leave of the pace.

    With s_j the start of step j and a_c that of the c-th N groups,

        a_c >= s_{c-eta-1} + T_s             admission, at the publication that makes room
        a_c >= a_{c-C/B} + E[L]              a place for each rollout
        s_j >= s_{j-1} + T_s                 the trainer
        s_j >= (start of group (j+1) N) + E[longest of G]
        s_j >= a_c + X_c                     for every c that is K versions old by then

    X_c is the longest of N groups, drawn by its quantiles in a fixed random order. Without the last
    line, and with places enough, the period is max(T_s, (T_s + E[longest of G]) / (eta + 1/2)).
    """
    train_s, eta = workload.train_s, policy.eta
    # Without run-ahead every group is waited for, whatever the bound.
    bound = policy.max_lag if eta else 0
    durations, size = workload.durations, workload.group_size
    kept = 1 - workload.filtered_frac
    steps = PACED_STEPS
    places = workload.concurrency * kept / workload.batch
    held_s = durations.mean_longest_s(size) if workload.places == "group" else durations.mean_s
    # Where places hold only a part of N groups, the last of them start later.
    late_s = max(0.0, 1 / places - 1) * held_s
    start_s, train_at = _recursion(
        longest=_longest_of_steps(workload, workload.groups_per_step / kept, late_s, steps),
        mean_longest_s=durations.mean_longest_s(size),
        held_s=held_s,
        places=places,
        train_s=train_s,
        eta=eta,
        bound=bound,
    )
    published = train_at + train_s
    count = steps - 1
    gap = np.maximum(start_s[1 : count + 1] - start_s[:count], 1e-12)
    room = np.concatenate([np.zeros(eta), published])[:count]  # admits the N groups after c
    return _Pace(
        start_s=start_s,
        trained_s=train_at,
        published_s=published,
        free=np.clip((start_s[1 : count + 1] - room) / gap, 0.0, 1.0),
    )


def _recursion(
    *,
    longest: list[float],
    mean_longest_s: float,
    held_s: float,
    places: float,
    train_s: float,
    eta: int,
    bound: int | None,
) -> tuple[Floats, Floats]:
    """Starts of N groups each, and of the steps; `places` in steps' worth of rollouts."""
    steps = len(longest)
    whole, part = int(places), places - int(places)
    begun: list[float] = []
    trained: list[float] = []
    old, old_done = 0, 0.0

    def begin() -> None:
        c = len(begun)
        at = begun[-1] if begun else 0.0
        if c > eta:
            at = max(at, trained[c - eta - 1] + train_s)
        if places >= 1:
            if c > whole:
                freed = (1 - part) * begun[c - whole] + part * begun[c - whole - 1]
                at = max(at, freed + held_s)
        elif begun:
            at = max(at, begun[-1] + held_s / places)
        begun.append(at)

    while len(begun) <= eta:
        begin()
    for j in range(steps):
        at = trained[-1] + train_s if trained else 0.0
        # The start of the next N groups, which at eta = 0 only this step's publication permits.
        if eta:
            following = begun[j + 1]
            gap = following - begun[j]
            room = trained[j - eta] + train_s if j >= eta else 0.0
            free = min(1.0, max(0.0, (following - room) / gap)) if gap > 0 else 0.0
            at = max(at, following - (1 - free) * gap / 2 + mean_longest_s)
        if bound is not None:
            limit = trained[j - bound] + train_s if 0 < bound <= j else math.inf if not bound else 0
            while old < len(begun) and begun[old] < limit:
                old_done = max(old_done, begun[old] + longest[min(old, steps - 1)])
                old += 1
            at = max(at, old_done)
        trained.append(at)
        begin()
    return np.array(begun), np.array(trained)


def _longest_of_steps(workload: Workload, groups: float, late_s: float, steps: int) -> list[float]:
    """From the first start of so many groups, spread over `late_s`, to their last end; once per
    step, by quantiles in a random order."""
    values, weights = workload.durations.longest(workload.group_size)
    upto = np.cumsum(np.maximum(weights, 0.0))
    ends, offsets = values, np.zeros(1)
    if late_s:
        offsets = late_s * (np.arange(SPREAD) + 0.5) / SPREAD
        ends = np.sort(np.concatenate([values, values + late_s]))
    log_p = np.zeros(len(ends))
    for offset in offsets:
        done = np.searchsorted(values, ends - offset, side="right")
        share = np.concatenate([[0.0], upto])[done]
        log_p += np.log(np.maximum(share, 1e-300)) * groups / len(offsets)
    order = np.random.default_rng(0).permutation(steps)
    index = np.searchsorted(log_p, np.log((order + 0.5) / steps))
    return ends[np.minimum(index, len(ends) - 1)].tolist()


# --------------------------------------------------------------------------- one by one


def _spread(workload: Workload, flow: _Flow) -> tuple[float, float]:
    """The lag that 95 of 100 groups do not exceed, and the mean lag of tokens."""
    size, stagger = workload.group_size, _stagger_s(workload)
    rng = np.random.default_rng(0)
    groups = max(1000, DRAWS // size)
    rollouts = workload.durations.draw(rng, groups, size)
    starts = np.arange(size) * (0.0 if workload.places == "group" else stagger)
    gather_s = workload.groups_per_step / workload.group_rate
    wait = flow.left_s + rng.uniform(0, gather_s, groups)
    lags = np.ceil(((rollouts + starts).max(axis=1) + wait - flow.idle_s) / flow.period_s)
    # From a token to its group's end, by tokens, in the place of generate; in-flight ones are on
    # average half a rollout nearer to it.
    durations = workload.durations
    to_end = durations.token_weighted_longest_s(size)
    if workload.in_flight:
        to_end -= durations.mean_square / (2 * durations.mean_s)
    token_lag = identity_lag(
        generate_s=to_end,
        wait_s=flow.wait_s,
        idle_s=flow.idle_s,
        period_s=flow.period_s,
        phi=flow.phi,
    )
    return _p95(lags), token_lag


def _spread_of_quota(
    workload: Workload, flow: _Flow, pace: _Pace, bound: int | None
) -> tuple[float, float]:
    """The same by drawing groups into the steps of the pace: each is trained in the first step
    after its end, or when its turn comes, as oldest first has it."""
    size = workload.group_size
    rng = np.random.default_rng(0)
    groups = max(1000, DRAWS // size)
    rollouts = workload.durations.draw(rng, groups, size)
    c = rng.integers(pace.skip, len(pace.free) - pace.skip, groups)
    begun = pace.at(c, rng.random(groups))
    version = pace.version(begun)
    done = np.searchsorted(pace.trained_s, begun + rollouts.max(axis=1))
    lags = np.maximum(0, done - version).astype(np.float64)
    if bound is not None:
        lags = np.minimum(lags, bound)
    lags = _of_mean(lags, flow.mean_lag)
    total = np.concatenate([[0.0], np.cumsum(pace.published_s)])

    def integral(t: Floats) -> Floats:
        before = pace.version(t)
        return before * t - total[before]

    trained_at = ((version + lags)[:, None] * rollouts).sum()
    starts = np.broadcast_to(begun[:, None], rollouts.shape)
    if workload.in_flight:
        sampled_at = (integral(starts + rollouts) - integral(starts)).sum()
    else:
        sampled_at = (version[:, None] * rollouts).sum()
    return _p95(lags), max(0.0, float((trained_at - sampled_at) / rollouts.sum()))


def _p95(lags: Floats) -> float:
    return max(0.0, float(np.quantile(lags, 0.95, method="inverted_cdf")))


def _of_mean(lags: Floats, mean: float) -> Floats:
    """None younger than a level at which their mean is `mean`; as they are where it is less."""
    low, high = 0.0, float(max(lags.max(), mean)) + 1
    for _ in range(40):
        level = (low + high) / 2
        whole, part = math.floor(level), level - math.floor(level)
        lower, upper = np.maximum(lags, whole).mean(), np.maximum(lags, whole + 1).mean()
        low, high = (level, high) if (1 - part) * lower + part * upper < mean else (low, level)
    whole, part = math.floor(low), low - math.floor(low)
    order = np.random.default_rng(1).random(len(lags))
    return np.maximum(lags, np.where(order < part, whole + 1, whole))
