"""The simulator: conservation, exact cases, and the closed form beside it."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.test_staleness import workload
from treadle.errors import ConfigError
from treadle.plan import durations as D
from treadle.plan.simulate import simulate
from treadle.plan.staleness import identity_lag, predict
from treadle.plan.workload import Blocking, Prediction, QueueDrop, Quota

POLICIES = [QueueDrop(queue=1), QueueDrop(queue=1.5), Blocking(queue=1), Quota(eta=1, max_lag=2)]


def test_the_same_seed_gives_the_same_events():
    one, two, other = (
        simulate(workload(), QueueDrop(), steps=20, seed=seed).lags for seed in (3, 3, 4)
    )
    assert np.array_equal(one, two) and not np.array_equal(one, other)


@given(
    st.sampled_from(POLICIES),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 20),
    st.floats(0.1, 4.0),
    st.sampled_from([0.0, 0.4]),
    st.integers(0, 10_000),
)
@settings(deadline=None, max_examples=60)
def test_every_run_goes_on_and_trains_each_group_once(
    policy, group_size, groups, concurrency, train_s, filtered, seed
):
    w = replace(
        workload(group_size=group_size, groups_per_step=groups, filtered_frac=filtered),
        concurrency=concurrency,
        train_s=train_s,
    )
    found = simulate(w, policy, steps=15, warmup=0, seed=seed)
    trained = [g for step in found.steps for g in step]
    assert len(trained) == len(set(trained)) == 15 * groups
    assert all(len(step) == groups for step in found.steps)
    assert found.lags.min() >= 0 and 0 <= found.prediction.sampler_utilization <= 1 + 1e-9
    if isinstance(policy, Quota):
        assert found.max_lag <= 2
    if not isinstance(policy, QueueDrop):
        assert found.prediction.dropped_frac == 0


def test_synchronous_steps_are_training_and_the_longest_rollout():
    """8 rollouts of 3 s on 8 places, 2 s of training: 5 s, lag 0, places busy 3 of 5."""
    w = replace(
        workload(group_size=4, groups_per_step=2, durations=D.fixed(3)), concurrency=8, train_s=2
    )
    found = simulate(w, Quota(eta=0, max_lag=0), steps=20).prediction
    assert found.mean_lag == found.p95_lag == found.token_lag == 0
    assert found.step_period_s == pytest.approx(5)
    assert found.trainer_utilization == pytest.approx(2 / 5)
    assert found.sampler_utilization == pytest.approx(3 / 5, rel=0.06)


def test_rollouts_beyond_the_places_wait_for_one():
    """The same on 4 places: two waves of 3 s."""
    w = replace(
        workload(group_size=4, groups_per_step=2, durations=D.fixed(3)), concurrency=4, train_s=2
    )
    assert simulate(w, Quota(eta=0), steps=20).prediction.step_period_s == pytest.approx(8)


def test_token_lags_by_hand():
    """Rollouts of 4 s, steps of 1 s, nothing else: a token at age u is trained 4 - u seconds and
    the group's gathering later. Of one group per step and one rollout per group, lag is 4 or 5
    and the token mean is 2 less, half a rollout."""
    w = replace(
        workload(group_size=1, groups_per_step=1, durations=D.fixed(4)), concurrency=4, train_s=1
    )
    flying = simulate(w, QueueDrop(), steps=100).prediction
    pinned = simulate(replace(w, in_flight=False), QueueDrop(), steps=100).prediction
    assert pinned.token_lag == pinned.mean_lag == flying.mean_lag
    assert flying.token_lag == pytest.approx(flying.mean_lag - 2, abs=0.6)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_publication_that_stops_generation_leaves_every_lag_as_it_is(policy):
    base = simulate(workload(), policy, steps=40)
    paused = simulate(workload(sync_s=0.4), policy, steps=40)
    assert np.array_equal(base.lags, paused.lags)
    assert paused.prediction.step_period_s == pytest.approx(base.prediction.step_period_s + 0.4)
    assert paused.prediction.generate_s > base.prediction.generate_s


def test_the_unit_of_time_changes_no_lag():
    base = workload(durations=D.lognormal(1, 1))
    minutes = replace(base, durations=D.lognormal(64, 1), train_s=base.train_s * 64)
    one, other = (simulate(w, QueueDrop(), steps=40) for w in (base, minutes))
    assert np.array_equal(one.lags, other.lags)


@pytest.mark.parametrize(
    ("policy", "rho", "phi"),
    [
        (QueueDrop(queue=1), 0.6, 0.5),
        (QueueDrop(queue=2), 1.5, 0.5),
        (Quota(eta=2), 1.0, 0.0),
        (Quota(eta=30), 0.5, 0.5),
    ],
)
def test_measured_parts_add_up_to_the_measured_lag(policy, rho, phi):
    found = simulate(workload(rho=rho, sync_s=0.2), policy, steps=400)
    p = found.prediction
    phi *= 1 - 0.2 / p.step_period_s
    expected = identity_lag(
        generate_s=p.generate_s,
        wait_s=p.wait_s,
        idle_s=p.idle_s,
        period_s=p.step_period_s,
        phi=phi,
    )
    assert p.mean_lag == pytest.approx(expected, abs=0.07)


@pytest.mark.parametrize("queue", [1, 2])
def test_a_full_queue_that_blocks_makes_single_rollouts_exactly_c_over_b_plus_q_old(queue):
    """Nothing starts but at a training, and then C/B + q steps of groups are there: Little."""
    w = workload(group_size=1, groups_per_step=32, rho=2.5)
    found = simulate(w, Blocking(queue=queue), steps=200).prediction
    assert found.mean_lag == pytest.approx(1 + queue, abs=0.02)
    assert found.trainer_utilization == pytest.approx(1, abs=0.01)


def test_what_a_full_queue_throws_away_does_not_depend_on_how_long_it_took():
    w = workload(durations=D.lognormal(1, 1), rho=2.0)
    found = simulate(w, QueueDrop(), steps=400)
    assert found.prediction.dropped_frac == pytest.approx(0.5, abs=0.03)
    assert found.durations_s.mean() == pytest.approx(found.offered_s.mean(), rel=0.05)


CELLS = [
    # G, N, C/B, rho, q, durations
    (1, 32, 0.5, 0.5, 1, "exp:mean=1"),
    (1, 32, 2, 1.5, 2, "lognormal:mean=1,sigma=1"),
    (8, 16, 1, 0.9, 1, "lognormal:mean=1,sigma=0.5"),
    (8, 16, 1, 1.0, 1, "exp:mean=1"),
    (8, 16, 2, 1.0, 2, "lognormal:mean=1,sigma=1"),
    (8, 16, 0.5, 2.5, 1, "lognormal:mean=1,sigma=1.2,clip=8"),
    (16, 8, 1, 1.1, 1, "lognormal:mean=1,sigma=0.5"),
    (16, 8, 0.5, 1.0, 2, "exp:mean=1"),
]


@pytest.mark.parametrize(("g", "n", "slots", "rho", "queue", "text"), CELLS)
def test_the_closed_form_of_queue_drop_is_what_the_simulator_finds(g, n, slots, rho, queue, text):
    w = workload(
        group_size=g, groups_per_step=n, slots=slots, rho=rho, durations=D.parse(text), sync_s=0.1
    )
    near(predict(w, QueueDrop(queue=queue)), simulate(w, QueueDrop(queue=queue)).prediction)


@pytest.mark.parametrize("places", ["rollout", "group"])
@pytest.mark.parametrize("filtered", [0.0, 0.3])
def test_the_closed_form_holds_for_filters_and_for_places_of_groups(places, filtered):
    w = workload(places=places, filtered_frac=filtered, rho=0.95)
    near(predict(w, QueueDrop()), simulate(w, QueueDrop()).prediction)


@pytest.mark.parametrize(
    "policy",
    [Quota(eta=1), Quota(eta=2, max_lag=4), Quota(eta=4, max_lag=8), Quota(eta=8, max_lag=16)],
)
@pytest.mark.parametrize("rho", [0.6, 1.5])
def test_the_closed_form_of_a_quota_is_what_the_simulator_finds(policy, rho):
    w = workload(rho=rho)
    near(predict(w, policy), simulate(w, policy).prediction, lag=0.25)


@pytest.mark.parametrize("rho", [0.6, 2.0])
@pytest.mark.parametrize("queue", [1, 2])
def test_the_closed_form_of_a_blocking_queue_is_near(rho, queue):
    """exp, G = 8, C/B = 1; at rho = 2 another simulator found 2.9 and 3.9."""
    w = workload(rho=rho)
    simulated = simulate(w, Blocking(queue=queue)).prediction
    if rho == 2.0:
        assert simulated.mean_lag == pytest.approx(1.9 + queue, abs=0.12)
    assert predict(w, Blocking(queue=queue)).mean_lag == pytest.approx(simulated.mean_lag, abs=0.6)


def near(found: Prediction, simulated: Prediction, *, lag: float = 0.3) -> None:
    assert abs(found.mean_lag - simulated.mean_lag) <= lag
    assert abs(found.p95_lag - simulated.p95_lag) <= 1
    assert abs(found.token_lag - simulated.token_lag) <= 0.5
    assert found.step_period_s == pytest.approx(simulated.step_period_s, rel=0.06)
    assert found.sampler_utilization == pytest.approx(simulated.sampler_utilization, abs=0.05)
    assert found.trainer_utilization == pytest.approx(simulated.trainer_utilization, abs=0.05)
    assert found.dropped_frac == pytest.approx(simulated.dropped_frac, abs=0.05)
    assert found.rho == simulated.rho


@pytest.mark.parametrize(
    ("slots", "rho", "eta", "periods"),
    [
        (1.0, 1.0, 2, {2: 1.60, 4: 1.24, 6: 1.21, None: 1.21}),
        (1.0, 1.0, 4, {4: 1.13, 8: 1.00, None: 1.00}),
    ],
)
def test_the_price_of_a_bound_on_lag_is_the_known_one(slots, rho, eta, periods):
    """Periods in training steps of lognormal 0.5, G = 8, N = 16, by another simulator."""
    w = workload(slots=slots, rho=rho, durations=D.lognormal(1, 0.5))
    for bound, period in periods.items():
        runs = [
            simulate(w, Quota(eta=eta, max_lag=bound), steps=250, seed=seed) for seed in range(3)
        ]
        mean = np.mean([r.prediction.step_period_s for r in runs]) / w.train_s
        assert mean == pytest.approx(period, rel=0.03)
        if bound is not None:
            assert max(r.max_lag for r in runs) <= bound
    assert max(r.max_lag for r in runs) > 4


def test_what_nobody_waits_for_is_refused():
    with pytest.raises(ConfigError, match="rollouts would be simulated"):
        simulate(workload(groups_per_step=100_000), QueueDrop())
    with pytest.raises(ConfigError, match="`steps` must be >= 2"):
        simulate(workload(), QueueDrop(), steps=1)


def test_a_period_of_nothing_else_than_training_is_not_rounded_up():
    found = simulate(workload(rho=4.0), QueueDrop(), steps=50).prediction
    assert found.trainer_utilization == pytest.approx(1.0, abs=0.01)
    assert math.isfinite(found.token_lag)
