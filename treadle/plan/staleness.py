"""The lag of a run in closed form, before it runs.

Per trained group, in versions and for one publication per step,

    S = (generate + wait - idle) / T + phi

with generate = first start to last end, wait = from there to the start of training, idle = last
publication to the start of training, T = the step period, and phi = 1/2 where groups start whenever
a place is free, 0 where their starts are locked to publications (`identity_lag`). The rest of this
file says what those four are, for each policy.

Guarantees: pure and quick (milliseconds), the same answer each time. How far it is from the
simulator is measured by `benchmarks/staleness.py` on 504 settings, and in `tests/plan`.

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
    if isinstance(policy, QueueDrop):
        flow, bound = _queue_drop(workload, policy), None
    elif isinstance(policy, Blocking):
        flow, bound = _blocking(workload, policy), None
    else:
        flow, bound = _quota(workload, policy), policy.max_lag
    p95, token_lag = _spread(workload, flow, bound)
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


def _quota(workload: Workload, policy: Quota) -> _Flow:
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
    free_s = train_s + backlog.missing / rate
    longest = workload.durations.mean_longest_s(workload.group_size)
    paced_s = _paced_period_s(workload, policy, longest)
    period = max(free_s, paced_s)
    full = backlog.fullness if room > 0 and paced_s <= 1.02 * free_s else 1.0
    return _Flow(
        mean_lag=min(float(eta), unqueued + backlog.left / n) if full < 1 else float(eta),
        period_s=period,
        generate_s=generate if full < 1 else longest,
        idle_s=period - train_s,
        phi=0.5 * (1 - full),
        left_s=backlog.left / rate,
    )


PACED_STEPS = 8000


def _paced_period_s(workload: Workload, policy: Quota, longest_s: float) -> float:
    """The period that the quota, and waiting for groups that are max_lag old, leave.

    With s_j the start of step j,

        s_j >= s_{j-1} + T_s                          the trainer
        s_j >= s_{j-eta-1/2} + T_s + E[group]         N of (eta + 1) N have finished
        s_j >= s_{j-K-1} + T_s + X_j                  all that started K versions ago have

    X the longest of N groups. Without the last line the period is
    max(T_s, (T_s + E[group]) / (eta + 1/2)); with it, it is the growth rate of the recursion, for
    which X is drawn by its quantiles in a fixed random order.
    """
    train_s, eta, bound = workload.train_s, policy.eta, policy.max_lag
    unbound_s = max(train_s, (train_s + longest_s) / (eta + 0.5)) if eta else train_s
    if not eta:
        bound = 0
    if bound is None:
        return unbound_s
    n = workload.groups_per_step / (1 - workload.filtered_frac)
    values, weights = workload.durations.longest(workload.group_size)
    upto = np.cumsum(np.maximum(weights, 0.0))
    order = np.random.default_rng(0).permutation(PACED_STEPS)
    p = ((order + 0.5) / PACED_STEPS) ** (1 / n)
    index = np.minimum(np.searchsorted(upto, p), len(values) - 1)
    longest = values[index].tolist()
    starts = [0.0] * (bound + 2)
    for x in longest:
        half = (starts[-eta] + starts[-eta - 1]) / 2 if eta else starts[-1]
        starts.append(
            max(
                starts[-1] + train_s,
                half + train_s + longest_s if eta else 0.0,
                starts[-bound - 1] + train_s + x,
            )
        )
    return max(unbound_s, starts[-1] / PACED_STEPS)


# --------------------------------------------------------------------------- one by one


def _spread(workload: Workload, flow: _Flow, bound: int | None) -> tuple[float, float]:
    """The lag that 95 of 100 groups do not exceed, and the mean lag of tokens."""
    size, stagger = workload.group_size, _stagger_s(workload)
    rng = np.random.default_rng(0)
    groups = max(1000, DRAWS // size)
    rollouts = workload.durations.draw(rng, groups, size)
    anywhere = 2 * flow.phi
    """Share of the flow in which groups start at any time; the rest start at publications."""
    p95 = token = 0.0
    if anywhere > 0:
        starts = np.arange(size) * (0.0 if workload.places == "group" else stagger)
        gather_s = workload.groups_per_step / workload.group_rate
        wait = flow.left_s + rng.uniform(0, gather_s, groups)
        lags = np.ceil(((rollouts + starts).max(axis=1) + wait - flow.idle_s) / flow.period_s)
        p95 += anywhere * _p95(lags, bound)
        token += anywhere * _token_lag(workload, flow)
    if anywhere < 1:
        lags = _locked_lags(rollouts.max(axis=1), flow, bound)
        p95 += (1 - anywhere) * _p95(lags, bound)
        seconds = rollouts.sum()
        newer = _versions_within(rollouts, lags, flow.period_s) if workload.in_flight else 0.0
        own = (lags[:, None] * rollouts).sum()
        token += (1 - anywhere) * float((own - newer) / seconds)
    return float(round(p95)), token


def _p95(lags: Floats, bound: int | None) -> float:
    found = max(0.0, float(np.quantile(lags, 0.95, method="inverted_cdf")))
    return found if bound is None else min(found, float(bound))


def _token_lag(workload: Workload, flow: _Flow) -> float:
    """Of tokens of groups that start at any time: from a token to its group's end, by tokens, in
    the place of generate; in-flight ones are on average half a rollout nearer to it."""
    durations = workload.durations
    to_end = durations.token_weighted_longest_s(workload.group_size)
    if workload.in_flight:
        to_end -= durations.mean_square / (2 * durations.mean_s)
    return identity_lag(
        generate_s=to_end, wait_s=flow.wait_s, idle_s=flow.idle_s, period_s=flow.period_s
    )


def _locked_lags(longest: Floats, flow: _Flow, bound: int | None) -> Floats:
    """Of groups that start at publications and are trained oldest first: all become as old as the
    flow makes them, those that take longer are trained when they have finished."""
    done = np.maximum(0, np.ceil((longest - flow.idle_s) / flow.period_s))
    if bound is not None:
        done = np.minimum(done, bound)
    low, high = 0.0, float(max(done.max(), flow.mean_lag)) + 1
    for _ in range(50):
        middle = (low + high) / 2
        whole = math.floor(middle)
        part = middle - whole
        mean = (1 - part) * np.maximum(done, whole).mean() + part * np.maximum(
            done, whole + 1
        ).mean()
        low, high = (middle, high) if mean < flow.mean_lag else (low, middle)
    whole, part = math.floor(low), low - math.floor(low)
    level = np.where(np.arange(len(done)) < part * len(done), whole + 1, whole)
    return np.maximum(done, level)


def _versions_within(rollouts: Floats, lags: Floats, period_s: float) -> float:
    """Sum over rollouts of the integral of floor(u / period): how much newer than its rollout's
    start a token is, for starts at publications. Never newer than what trains it."""
    whole = np.minimum(np.floor(rollouts / period_s), lags[:, None])
    within = period_s * whole * (whole - 1) / 2 + whole * (rollouts - whole * period_s)
    return float(within.sum())
