"""Lag predicted in closed form against a simulation that drives the run's own scheduling.

    python -m benchmarks.staleness --json            a fair sample of every part, some minutes
    python -m benchmarks.staleness --json --full     all of it

Parts, each a key of `detail`:
- `grid`: queue-drop, 504 settings: durations exp, lognormal 0.5 and 1.0, lognormal 1.2 capped at 8
  times its mean; (G, N) = (1, 32), (8, 16), (16, 8); C/B 0.5, 1, 2; rho 0.5 to 2.5; queue 1, 2;
  publications that stop generation for 0.2 of a
  training in one setting of seven; 340 steps measured in each. Errors
  are |closed form - simulator| in steps, by regime, beside those of the bare formula;
- `quota`: the same for admission, eta 1 to 8 and max_lag eta to 4 eta;
- `bound`: the price of a bound on lag: step periods for nine settings and six values of max_lag
  beside those of another simulator. With heavy tails 250 steps of one seed are a small sample (one
  rollout in 256,000 decides the largest lag), so several seeds are run and their spread is given;
- `published`: six runs of an 8B model on GPUs, measured by others, beside both formulas.

Everything is computed on a virtual clock and repeats exactly on any machine. Figures:
- staleness.mae_sim, staleness.max_sim: error of the mean lag over the grid, steps;
- staleness.p95_max_sim: largest error of the 95th percentile; staleness.p95_exact: share without;
- staleness.period_mean_sim, staleness.period_max_sim: error of the step period, share;
- staleness.token_mae_sim: error of the mean token lag, steps;
- staleness.mae_sim_bare: the bare formula's error on the same settings;
- staleness.mae_quota, staleness.period_mean_quota: the same for admission;
- staleness.bound_exceeded: trained groups older than max_lag, in all simulations: 0;
- staleness.bound_period_light: largest deviation of a mean period from the other simulator's where
  tails are light; staleness.bound_period_heavy: the same where they are heavy;
- staleness.bound_period_sd: the latter in standard deviations between seeds, of the settings that
  were run with enough of them to have one: one seed is what the other simulator ran;
- staleness.published_max: largest error of the closed form on the published runs, steps.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.common import finish, say
from treadle.plan.durations import Durations, exponential, lognormal
from treadle.plan.simulate import Simulated, simulate
from treadle.plan.staleness import bare_lag, predict
from treadle.plan.workload import BufferPolicy, Prediction, QueueDrop, Quota, Workload

DURATIONS = {
    "exp": exponential(1),
    "lognormal 0.5": lognormal(1, 0.5),
    "lognormal 1.0": lognormal(1, 1),
    "lognormal 1.2 clip 8": lognormal(1, 1.2).clipped(8),
}
SHAPES = ((1, 32), (8, 16), (16, 8))
SLOTS = (0.5, 1.0, 2.0)
RHOS = (0.5, 0.9, 1.0, 1.1, 1.5, 2.5)
QUEUES = (1, 2)
PAUSE = 0.2
"""Of a training; with C/B = 1 and queue 1, where it is 0 in another setting."""
QUOTAS = ((1, 1), (1, 2), (2, 2), (2, 4), (2, 8), (4, 4), (4, 8), (4, 16), (8, 16), (8, 32))

BOUND = [
    # sigma, G, N, C/B, rho, eta; periods at max_lag = eta, 2, 3, 4, 8 eta and none
    (0.5, 8, 16, 1, 1.0, 2, (1.60, 1.24, 1.21, 1.21, 1.21, 1.21)),
    (0.5, 8, 16, 1, 1.0, 4, (1.13, 1.00, 1.00, 1.00, 1.00, 1.00)),
    (0.5, 16, 64, 1, 1.0, 4, (1.31, 1.02, 1.00, 1.00, 1.00, 1.00)),
    (0.5, 16, 64, 2, 2.0, 4, (1.29, 1.02, 1.00, 1.00, 1.00, 1.00)),
    (1.0, 8, 16, 1, 1.0, 4, (2.97, 2.00, 1.61, 1.40, 1.06, 1.03)),
    (1.0, 8, 16, 1, 2.0, 2, (2.32, 1.60, 1.36, 1.26, 1.06, 1.05)),
    (1.0, 8, 16, 1, 2.0, 4, (1.63, 1.24, 1.08, 1.03, 1.00, 1.00)),
    (1.0, 16, 64, 1, 1.0, 4, (4.80, 3.31, 2.56, 2.19, 1.53, 1.18)),
    (1.0, 16, 64, 2, 2.0, 4, (4.80, 3.30, 2.55, 2.18, 1.51, 1.15)),
]
MIN_SEEDS = 8
"""For a standard deviation that says something."""
FACTORS = (1, 2, 3, 4, 8, None)

PUBLISHED = [
    # concurrency, batch, queue, rho, M, measured lag (Dong, Goel and Yu, 2026; Qwen3-8B, GRPO)
    (120, 240, 2, 0.63, 1.42, 1.26),
    (240, 120, 2, 0.92, 1.43, 3.59),
    (128, 128, 2, 1.07, 1.44, 3.09),
    (240, 120, 1, 0.86, 1.42, 3.40),
    (120, 120, 1, 0.67, 1.42, 1.92),
    (128, 128, 1, 1.14, 1.45, 2.01),
]


def workload(
    durations: Durations, shape: tuple[int, int], slots: float, rho: float, pause: float = 0.0
) -> Workload:
    """By C/B and rho; `pause` in trainings."""
    group_size, groups = shape
    concurrency = round(slots * group_size * groups)
    train_s = rho * group_size * groups * durations.mean_s / concurrency
    return Workload(
        concurrency=concurrency,
        group_size=group_size,
        groups_per_step=groups,
        train_s=train_s,
        durations=durations,
        sync_s=pause * train_s,
    )


@dataclass(frozen=True, kw_only=True)
class Cell:
    name: str
    group_size: int
    regime: str
    workload: Workload
    policy: BufferPolicy
    found: Prediction
    simulated: Simulated

    def error(self, key: str) -> float:
        """Closed form minus simulator; of a time, as a share of the simulated one."""
        a, b = getattr(self.found, key), getattr(self.simulated.prediction, key)
        return a / b - 1 if key.endswith("_s") else a - b


def run(name: str, w: Workload, policy: BufferPolicy, regime: str, seed: int) -> Cell:
    # The prediction is made first, from nothing that the simulation knows.
    found = predict(w, policy)
    simulated = simulate(w, policy, seed=seed)
    return Cell(
        name=name,
        group_size=w.group_size,
        regime=regime,
        workload=w,
        policy=policy,
        found=found,
        simulated=simulated,
    )


def sample(cells: Sequence[Any], share: int) -> list[tuple[int, Any]]:
    """One of `share`, at random and the same each time; the index is the seed."""
    numbered = list(enumerate(cells))
    random.Random(0).shuffle(numbered)
    return sorted(numbered[:: max(1, share)], key=lambda pair: pair[0])


def regime_of(rho: float) -> str:
    return "sampler-bound" if rho < 1 else "balanced" if rho == 1 else "trainer-bound"


# --------------------------------------------------------------------------- grid


def grid(share: int) -> list[Cell]:
    plain = [
        (*setting, 0.0) for setting in itertools.product(DURATIONS, SHAPES, SLOTS, RHOS, QUEUES)
    ]
    paused = [(name, shape, 1.0, rho, 1, PAUSE) for name, shape, rho in
              itertools.product(DURATIONS, SHAPES, RHOS)]  # fmt: skip
    cells = []
    for seed, (name, shape, slots, rho, queue, pause) in sample(plain + paused, share):
        w = workload(DURATIONS[name], shape, slots, rho, pause)
        cells.append(run(name, w, QueueDrop(queue=queue), regime_of(rho), seed))
    return cells


def quota(share: int) -> list[Cell]:
    settings = list(itertools.product(DURATIONS, SHAPES, SLOTS, RHOS, QUOTAS))
    cells = []
    for seed, (name, shape, slots, rho, (eta, bound)) in sample(settings, share):
        w = workload(DURATIONS[name], shape, slots, rho)
        cells.append(run(name, w, Quota(eta=eta, max_lag=bound), regime_of(rho), seed))
    return cells


def bare(cell: Cell) -> float:
    """Error of the bare formula."""
    w = cell.workload
    assert isinstance(cell.policy, QueueDrop)
    found = bare_lag(
        concurrency=w.concurrency,
        batch=w.batch,
        queue=cell.policy.queue,
        rho=w.rho,
        tailness=w.durations.tailness(w.group_size),
    )
    return found - cell.simulated.prediction.mean_lag


def errors(values: Sequence[float]) -> dict[str, float]:
    found = np.abs(np.array(values))
    return {
        "mean": float(found.mean()),
        "p95": float(np.quantile(found, 0.95)),
        "max": float(found.max()),
        "bias": float(np.mean(values)),
    }


def table(cells: Sequence[Cell], *, with_bare: bool) -> list[dict[str, Any]]:
    """Errors of the mean lag by regime and durations, and over all."""
    keys = sorted({(c.regime, c.name) for c in cells})
    parts: list[tuple[str, str, list[Cell]]] = [
        (regime, name, [c for c in cells if (c.regime, c.name) == (regime, name)])
        for regime, name in keys
    ]
    parts += [
        ("all", f"G = {size}", [c for c in cells if c.group_size == size])
        for size in sorted({c.group_size for c in cells})
    ]
    parts.append(("all", "all", list(cells)))
    rows = []
    for regime, name, some in parts:
        lags = [c.simulated.prediction.mean_lag for c in some]
        row: dict[str, Any] = {
            "regime": regime,
            "durations": name,
            "cells": len(some),
            "lag": [min(lags), max(lags)],
            "error": errors([c.error("mean_lag") for c in some]),
            "period_error": errors([c.error("step_period_s") for c in some]),
        }
        if with_bare:
            row["bare_error"] = errors([bare(c) for c in some])
        rows.append(row)
    return rows


def worst(cells: Sequence[Cell], key: str, count: int = 5) -> list[dict[str, Any]]:
    ordered = sorted(cells, key=lambda c: -abs(c.error(key)))[:count]
    return [
        {
            "durations": c.name,
            "group_size": c.group_size,
            "concurrency_over_batch": c.workload.concurrency / c.workload.batch,
            "rho": c.workload.rho,
            "policy": str(c.policy),
            "sync_s": c.workload.sync_s,
            "predicted": getattr(c.found, key),
            "simulated": getattr(c.simulated.prediction, key),
        }
        for c in ordered
    ]


def exceeded(found: Simulated) -> int:
    """Groups trained older than their bound."""
    bound = found.prediction.lag_bound
    return 0 if bound is None else int((found.lags > bound).sum())


# --------------------------------------------------------------------------- bound


def bound_table(seeds: int) -> tuple[list[dict[str, Any]], int]:
    rows, too_old = [], 0
    for sigma, size, groups, slots, rho, eta, known in BOUND:
        w = workload(lognormal(1, sigma), (size, groups), slots, rho)
        for factor, other in zip(FACTORS, known, strict=True):
            policy = Quota(eta=eta, max_lag=None if factor is None else factor * eta)
            # 64 groups of 16 are eight times the work: few seeds, but for one value of max_lag.
            count = seeds if groups < 64 or (sigma >= 1 and factor == 2) else seeds // 4
            runs = [simulate(w, policy, steps=250, seed=seed) for seed in range(count)]
            too_old += sum(map(exceeded, runs))
            periods = np.array([r.prediction.step_period_s for r in runs]) / w.train_s
            rows.append(
                {
                    "sigma": sigma,
                    "group_size": size,
                    "groups": groups,
                    "concurrency_over_batch": slots,
                    "rho": rho,
                    "eta": eta,
                    "max_lag": policy.max_lag,
                    "period": float(periods.mean()),
                    "period_sd": float(periods.std(ddof=1)),
                    "seeds": count,
                    "period_range": [float(periods.min()), float(periods.max())],
                    "other_simulator": other,
                    "closed_form": predict(w, policy).step_period_s / w.train_s,
                    "mean_lag": float(np.mean([r.prediction.mean_lag for r in runs])),
                    "largest_lag": max(r.max_lag for r in runs),
                }
            )
        say(
            f"bound: sigma {sigma}, {size} x {groups}, C/B {slots}, rho {rho}, eta {eta}: "
            + ", ".join(
                f"{r['period']:.2f} ({r['other_simulator']:.2f})" for r in rows[-len(FACTORS) :]
            )
        )
    return rows, too_old


# --------------------------------------------------------------------------- published


def of_tailness(m: float, size: int) -> Durations:
    """The lognormal whose groups have that tailness."""
    low, high = 0.01, 2.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if lognormal(1, middle).tailness(size) < m else (low, middle)
    return lognormal(1, low)


def published() -> list[dict[str, float]]:
    rows = []
    for concurrency, batch, queue, rho, m, measured in PUBLISHED:
        w = Workload(
            concurrency=concurrency,
            group_size=8,
            groups_per_step=batch // 8,
            train_s=rho * batch / concurrency,
            durations=of_tailness(m, 8),
        )
        rows.append(
            {
                "concurrency": concurrency,
                "batch": batch,
                "queue": queue,
                "rho": rho,
                "tailness": m,
                "measured": measured,
                "closed_form": predict(w, QueueDrop(queue=queue)).mean_lag,
                "bare": bare_lag(
                    concurrency=concurrency, batch=batch, queue=queue, rho=rho, tailness=m
                ),
            }
        )
    return rows


# --------------------------------------------------------------------------- all


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="only the document on stdout")
    parser.add_argument("--full", action="store_true", help="every setting, 32 seeds per bound")
    args = parser.parse_args(argv)
    started = time.process_time()

    drop = grid(1 if args.full else 4)
    say(f"grid: {len(drop)} settings, {time.process_time() - started:.0f} s of CPU")
    admitted = quota(8 if args.full else 36)
    say(f"quota: {len(admitted)} settings, {time.process_time() - started:.0f} s of CPU")
    bounds, too_old = bound_table(32 if args.full else 8)
    too_old += sum(exceeded(c.simulated) for c in admitted)
    runs = published()

    lag = errors([c.error("mean_lag") for c in drop])
    period = errors([c.error("step_period_s") for c in drop])
    p95 = [c.error("p95_lag") for c in drop]
    light = [r for r in bounds if r["sigma"] < 1]
    heavy = [r for r in bounds if r["sigma"] >= 1]
    figures = {
        "staleness.mae_sim": lag["mean"],
        "staleness.max_sim": lag["max"],
        "staleness.p95_max_sim": errors(p95)["max"],
        "staleness.p95_exact": float(np.mean([e == 0 for e in p95])),
        "staleness.period_mean_sim": period["mean"],
        "staleness.period_max_sim": period["max"],
        "staleness.token_mae_sim": errors([c.error("token_lag") for c in drop])["mean"],
        "staleness.mae_sim_bare": errors([bare(c) for c in drop])["mean"],
        "staleness.mae_quota": errors([c.error("mean_lag") for c in admitted])["mean"],
        "staleness.period_mean_quota": errors([c.error("step_period_s") for c in admitted])["mean"],
        "staleness.bound_exceeded": too_old,
        "staleness.bound_period_light": max(
            abs(r["period"] / r["other_simulator"] - 1) for r in light
        ),
        "staleness.bound_period_heavy": max(
            abs(r["period"] / r["other_simulator"] - 1) for r in heavy
        ),
        "staleness.bound_period_sd": max(
            abs(r["period"] - r["other_simulator"]) / max(r["period_sd"], 0.005)
            for r in heavy
            if r["seeds"] >= MIN_SEEDS
        ),
        "staleness.published_max": max(abs(r["closed_form"] - r["measured"]) for r in runs),
    }
    detail = {
        "grid": {
            "table": table(drop, with_bare=True),
            "worst_lag": worst(drop, "mean_lag"),
            "worst_p95": worst(drop, "p95_lag", 3),
            "worst_period": worst(drop, "step_period_s"),
        },
        "quota": {
            "table": table(admitted, with_bare=False),
            "p95_error": errors([c.error("p95_lag") for c in admitted]),
            "token_error": errors([c.error("token_lag") for c in admitted]),
            "worst_lag": worst(admitted, "mean_lag"),
            "worst_period": worst(admitted, "step_period_s"),
        },
        "bound": bounds,
        "published": runs,
        "cpu_s": time.process_time() - started,
        "full": args.full,
    }
    finish("staleness", figures, detail)
    return 0


if __name__ == "__main__":
    sys.exit(main())
