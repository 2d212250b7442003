"""The closed form: against published runs, its own limits, and figures worked by hand."""

import math
from dataclasses import replace

import pytest

from treadle.errors import ConfigError
from treadle.plan import durations as D
from treadle.plan.durations import Durations
from treadle.plan.staleness import bare_lag, identity_lag, predict
from treadle.plan.workload import Blocking, QueueDrop, Quota, Workload


def workload(
    *,
    group_size: int = 8,
    groups_per_step: int = 16,
    slots: float = 1.0,
    rho: float = 1.0,
    durations: Durations | None = None,
    **more: object,
) -> Workload:
    """By C/B and rho instead of concurrency and train_s."""
    durations = durations or D.exponential(1)
    batch = group_size * groups_per_step
    return Workload(
        concurrency=round(slots * batch),
        group_size=group_size,
        groups_per_step=groups_per_step,
        train_s=rho * durations.mean_s / slots,
        durations=durations,
        **more,  # pyright: ignore[reportArgumentType]
    )


PUBLISHED = [
    # concurrency, batch, queue, rho, M of the run; its lag; the bare formula by a reader's hand
    (120, 240, 2, 0.63, 1.42, 1.26, 1.34),
    (240, 120, 2, 0.92, 1.43, 3.59, 3.78),
    (128, 128, 2, 1.07, 1.44, 3.09, 3.25),
    (240, 120, 1, 0.86, 1.42, 3.40, 3.70),
    (120, 120, 1, 0.67, 1.42, 1.92, 2.09),
    (128, 128, 1, 1.14, 1.45, 2.01, 2.21),
]
"""GRPO runs of an 8B model by Dong, Goel and Yu (2026)."""


@pytest.mark.parametrize(("c", "b", "q", "rho", "m", "measured", "by_hand"), PUBLISHED)
def test_published_runs_are_met_by_both_formulas(c, b, q, rho, m, measured, by_hand):
    bare = bare_lag(concurrency=c, batch=b, queue=q, rho=rho, tailness=m)
    assert bare == pytest.approx(by_hand, abs=0.006)
    assert abs(bare - measured) <= 0.305
    found = predict(
        Workload(
            concurrency=c,
            group_size=8,
            groups_per_step=b // 8,
            train_s=rho * b / c,
            durations=of_tailness(m, 8),
        ),
        QueueDrop(queue=q),
    )
    assert found.rho == pytest.approx(rho, rel=1e-6)
    assert abs(found.mean_lag - measured) <= 0.25


def of_tailness(m: float, size: int) -> Durations:
    low, high = 0.01, 2.0
    for _ in range(40):
        middle = (low + high) / 2
        if D.lognormal(1, middle).tailness(size) < m:
            low = middle
        else:
            high = middle
    return D.lognormal(1, low)


@pytest.mark.parametrize("rho", [0.1, 0.2, 5.0, 10.0])
@pytest.mark.parametrize("queue", [1, 2])
def test_far_from_balance_the_form_is_the_bare_one(rho, queue):
    """With starts staggered over the places, which the bare form leaves out."""
    w = workload(rho=rho, groups_per_step=256)
    found = predict(w, QueueDrop(queue=queue))
    stagger = 3.5 * w.durations.mean_s / w.concurrency / found.step_period_s
    bare = bare_lag(
        concurrency=w.concurrency,
        batch=w.batch,
        queue=queue,
        rho=rho,
        tailness=w.durations.tailness(8),
    )
    assert found.mean_lag == pytest.approx(bare + stagger, abs=0.02)
    assert found.trainer_utilization == pytest.approx(min(1, rho), rel=0.01)
    assert found.dropped_frac == pytest.approx(max(0, 1 - 1 / rho), abs=0.01)


def test_the_identity_by_hand():
    """Windows of 7 s that end at a publication, one every 2 s: 3 or 4 publications each."""
    assert identity_lag(generate_s=6, wait_s=1, idle_s=0, period_s=2) == 4.0
    assert identity_lag(generate_s=6, wait_s=2, idle_s=0, period_s=2, phi=0) == 4.0
    assert identity_lag(generate_s=6, wait_s=1, idle_s=1, period_s=2) == 3.5


@pytest.mark.parametrize(
    "policy",
    [QueueDrop(queue=1), QueueDrop(queue=2), Quota(eta=2), Quota(eta=2, max_lag=4), Blocking()],
)
@pytest.mark.parametrize("rho", [0.5, 1.0, 2.5])
def test_the_parts_of_every_prediction_add_up_to_its_lag(policy, rho):
    found = predict(workload(rho=rho), policy)
    at_most = identity_lag(
        generate_s=found.generate_s,
        wait_s=found.wait_s,
        idle_s=found.idle_s,
        period_s=found.step_period_s,
    )
    assert at_most - 0.5 - 1e-9 <= found.mean_lag <= at_most + 1e-9


def test_a_publication_that_stops_generation_changes_periods_and_no_lag():
    base = predict(workload(rho=0.9), QueueDrop())
    paused = predict(workload(rho=0.9, sync_s=0.3), QueueDrop())
    assert paused.mean_lag == base.mean_lag and paused.token_lag == base.token_lag
    assert paused.step_period_s == pytest.approx(base.step_period_s + 0.3)
    assert paused.sampler_utilization == pytest.approx(base.step_period_s / paused.step_period_s)


def test_the_unit_of_time_changes_no_lag():
    base = workload(rho=0.9, durations=D.lognormal(1, 1))
    hours = replace(base, durations=D.lognormal(3600, 1), train_s=base.train_s * 3600)
    one, other = predict(base, QueueDrop()), predict(hours, QueueDrop())
    assert other.mean_lag == pytest.approx(one.mean_lag)
    assert other.p95_lag == one.p95_lag
    assert other.step_period_s == pytest.approx(3600 * one.step_period_s)


def test_filtered_groups_make_generation_slower_and_nothing_else():
    """A third of groups dropped is what 2/3 of the places would make, but for one group's time."""
    full = predict(workload(rho=0.6, slots=1.5, filtered_frac=1 / 3), QueueDrop())
    assert full.rho == pytest.approx(0.4)
    assert full.sampler_utilization == pytest.approx(1.0)


def test_a_quota_that_binds_has_a_mean_lag_of_eta_and_a_period_by_littles_law():
    """exp, G = 8, two batches of places: E[group] = H(8), T = (H(8) + T_s) / (eta + 1/2)."""
    w = workload(slots=2.0, rho=1.0)
    h8 = sum(1 / k for k in range(1, 9))
    for eta in (1, 2, 4):
        found = predict(w, Quota(eta=eta))
        assert found.mean_lag == pytest.approx(eta, abs=1e-9)
        assert found.step_period_s == pytest.approx((h8 + w.train_s) / (eta + 0.5), rel=1e-3)
    assert predict(w, Quota(eta=40)).step_period_s == pytest.approx(w.train_s, rel=0.05)


def test_a_quota_that_never_binds_is_a_queue_that_never_drops():
    w = workload(rho=0.5)
    free = predict(w, QueueDrop(queue=30))
    found = predict(w, Quota(eta=30))
    assert found.mean_lag == pytest.approx(free.mean_lag, abs=0.05)
    assert found.step_period_s == pytest.approx(free.step_period_s, rel=0.01)
    assert found.p95_lag == free.p95_lag


def test_synchronous_training_has_no_lag_and_waits_for_the_longest_of_the_batch():
    w = workload(rho=1.0, slots=1.0, groups_per_step=4)
    found = predict(w, Quota(eta=0, max_lag=0))
    longest = w.durations.mean_longest_s(32)
    assert found.mean_lag == found.p95_lag == found.token_lag == 0
    assert found.step_period_s == pytest.approx(w.train_s + longest, rel=0.01)
    assert found.trainer_utilization == pytest.approx(w.train_s / found.step_period_s)


def test_a_smaller_bound_on_lag_never_makes_steps_shorter():
    w = workload(durations=D.lognormal(1, 1))
    bounds = [4, 6, 8, 12, 16, 32, None]
    periods = [predict(w, Quota(eta=4, max_lag=k)).step_period_s for k in bounds]
    assert periods == sorted(periods, reverse=True)
    assert periods[0] > 2 * periods[-1]


def test_a_group_that_holds_its_places_to_the_end_has_no_tail_in_its_lag():
    """C/B steps pass while a group is generated, whatever its longest rollout."""
    for durations in (D.exponential(1), D.lognormal(1, 1)):
        w = workload(slots=2, rho=0.5, durations=durations, places="group")
        found = predict(w, QueueDrop())
        assert found.generate_s / found.step_period_s == pytest.approx(2.0, rel=0.03)


def test_pinned_tokens_are_older_than_those_that_go_on_with_new_weights():
    flying = predict(workload(rho=0.9), QueueDrop())
    pinned = predict(workload(rho=0.9, in_flight=False), QueueDrop())
    half = 2 / 2  # E[L^2] / (2 E[L]) of exp(1)
    assert pinned.token_lag - flying.token_lag == pytest.approx(
        half / flying.step_period_s, rel=0.01
    )
    assert pinned.mean_lag == flying.mean_lag


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"slots": 0.001}, "`concurrency` must be >= 1"),
        ({"rho": 0.0}, "`train_s` must be > 0"),
        ({"rho": math.nan}, "`train_s` must be > 0"),
        ({"sync_s": -1.0}, "`sync_s` must be >= 0"),
        ({"filtered_frac": 1.0}, "`filtered_frac` must be"),
        ({"slots": 0.05, "places": "group"}, "holds no group of 8"),
    ],
)
def test_a_workload_that_cannot_run_is_refused(change, says):
    with pytest.raises(ConfigError, match=says):
        workload(**change)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: QueueDrop(queue=0.5), "`queue` must be >= 1"),
        (lambda: Blocking(queue=math.inf), "`queue` must be >= 1"),
        (lambda: Quota(eta=-1), "`eta` must be >= 0"),
        (lambda: Quota(eta=4, max_lag=3), "`max_lag` must be >= eta"),
    ],
)
def test_a_policy_that_cannot_run_is_refused(make, says):
    with pytest.raises(ConfigError, match=says):
        make()


def test_durations_without_any_spread_have_a_lag_too():
    for rho in (0.5, 1.0, 2.0):
        found = predict(workload(rho=rho, durations=D.fixed(1)), QueueDrop())
        assert math.isfinite(found.mean_lag) and found.mean_lag >= 0
        assert found.trainer_utilization == pytest.approx(min(1, rho), rel=0.05)
