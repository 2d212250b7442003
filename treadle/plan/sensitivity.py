"""Which input of a plan matters most: each is changed a little, the rest stays.

Guarantees: changes are of the closed form, so that no noise is among them; an input that can only
change by whole numbers is changed by the least that is 10% or more, and its effect is scaled back
to 10%.

Takes: a `Workload` and a policy. Gives: one `Change` per input, the largest effect on lag first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from treadle.plan.staleness import predict
from treadle.plan.workload import Blocking, BufferPolicy, Prediction, QueueDrop, Quota, Workload

STEP = 0.10


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """What a tenth more of one input does, all others as they are."""

    input: str
    before: str
    after: str
    mean_lag: float
    """Steps more."""
    step_period_frac: float
    """Share of the period more."""


def sensitivities(workload: Workload, policy: BufferPolicy) -> tuple[Change, ...]:
    """The effect of +10% of every input that is not 0."""
    base = predict(workload, policy)
    changes = [
        _change(name, before, after, scale, base, predict(changed, changed_policy))
        for name, before, after, scale, changed, changed_policy in _variants(workload, policy)
    ]
    return tuple(sorted(changes, key=lambda change: -abs(change.mean_lag)))


def _change(
    name: str, before: str, after: str, scale: float, base: Prediction, other: Prediction
) -> Change:
    return Change(
        input=name,
        before=before,
        after=after,
        mean_lag=scale * (other.mean_lag - base.mean_lag),
        step_period_frac=scale * (other.step_period_s / base.step_period_s - 1),
    )


Variant = tuple[str, str, str, float, Workload, BufferPolicy]


def _variants(workload: Workload, policy: BufferPolicy) -> Iterator[Variant]:
    w, p = workload, policy
    if w.places == "rollout" or w.concurrency % w.group_size == 0:
        unit = 1 if w.places == "rollout" else w.group_size
        more, scale = _more(w.concurrency, unit)
        yield "concurrency", f"{w.concurrency}", f"{more}", scale, replace(w, concurrency=more), p
    more, scale = _more(w.groups_per_step)
    bigger = replace(w, groups_per_step=more)
    yield "batch", f"{w.batch}", f"{bigger.batch}", scale, bigger, p
    for name in ("train_s", "sync_s", "filtered_frac"):
        value = getattr(w, name)
        if value and (name != "filtered_frac" or value * (1 + STEP) < 1):
            more = value * (1 + STEP)
            yield name, f"{value:g}", f"{more:g}", 1.0, replace(w, **{name: more}), p
    longer = replace(w, durations=w.durations.scaled(1 + STEP))
    mean = w.durations.mean_s
    yield "durations, mean", f"{mean:.3g} s", f"{mean * (1 + STEP):.3g} s", 1.0, longer, p
    heavier = replace(w, durations=w.durations.spread(1 + STEP))
    tail, heavy = (each.durations.tailness(w.group_size) for each in (w, heavier))
    if heavy > tail * (1 + 1e-9):
        yield "durations, spread", f"M {tail:.2f}", f"M {heavy:.2f}", 1.0, heavier, p
    if isinstance(p, QueueDrop | Blocking):
        more, scale = _more(math.floor(p.queue * w.groups_per_step))
        queue = more / w.groups_per_step
        yield "queue", f"{p.queue:g}", f"{queue:.3g}", scale, w, replace(p, queue=queue)
    if isinstance(p, Quota):
        if p.eta:
            more, scale = _more(p.eta)
            bound = None if p.max_lag is None else max(more, p.max_lag)
            yield "eta", f"{p.eta}", f"{more}", scale, w, Quota(eta=more, max_lag=bound)
        if p.max_lag:
            more, scale = _more(p.max_lag)
            yield "max_lag", f"{p.max_lag}", f"{more}", scale, w, replace(p, max_lag=more)


def _more(value: int, unit: int = 1) -> tuple[int, float]:
    """A tenth more in whole units, and how much of that change a tenth is."""
    step = unit * max(1, math.ceil(STEP * value / unit))
    return value + step, STEP * value / step
