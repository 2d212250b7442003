"""Admission, order and lag: worked by hand, and driven as a whole on random finish orders."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.errors import ContractError
from treadle.schedule import Progress, Ready, group_lag, may_start, next_batch, token_lags


def test_synchronous_admission_starts_exactly_one_batch():
    assert may_start(Progress(started=7), groups_per_step=8, eta=0)
    assert not may_start(Progress(started=8), groups_per_step=8, eta=0)
    assert may_start(Progress(started=8, published=8), groups_per_step=8, eta=0)


def test_a_dropped_group_gives_its_place_back_at_once():
    assert may_start(Progress(started=8, dropped=1), groups_per_step=8, eta=0)


def test_run_ahead_of_one_step_admits_two_batches():
    assert may_start(Progress(started=15), groups_per_step=8, eta=1)
    assert not may_start(Progress(started=16), groups_per_step=8, eta=1)


def test_no_group_starts_that_no_step_would_train():
    done = Progress(started=16, dropped=0, published=8)
    assert may_start(done, groups_per_step=8, eta=1)
    assert not may_start(done, groups_per_step=8, eta=1, total_steps=2)


def test_the_batch_is_the_oldest_version_first_then_the_lowest_ordinal():
    finished = [
        Ready(ordinal=5, version=1),
        Ready(ordinal=9, version=0),
        Ready(ordinal=2, version=1),
    ]
    batch = next_batch(finished, [], groups_per_step=2, version=1, max_lag=4)
    assert batch == (9, 2)


def test_the_trainer_waits_for_a_group_only_when_it_is_max_lag_old():
    finished = [Ready(ordinal=i, version=2) for i in range(4)]
    young, old = [Ready(ordinal=9, version=1)], [Ready(ordinal=9, version=0)]
    assert next_batch(finished, young, groups_per_step=4, version=2, max_lag=2) == (0, 1, 2, 3)
    assert next_batch(finished, old, groups_per_step=4, version=2, max_lag=2) is None


def test_lag_counts_versions_between_sampling_and_training():
    """B069: one written definition, tested at 0, 1 and 2."""
    assert token_lags([3, 2, -1, 1], training_version=3) == (0, 1, 2)
    assert group_lag(1, training_version=3) == 2


def test_a_token_newer_than_its_trainer_breaks_the_contract():
    with pytest.raises(ContractError, match="version 4"):
        token_lags([4], training_version=3)


@given(
    st.integers(0, 10_000),
    st.integers(1, 5),
    st.integers(0, 3),
    st.integers(0, 3),
    st.integers(1, 5),
)
def test_every_run_ends_and_never_exceeds_max_lag(seed, n, eta, extra, steps):
    """B095: no combination of steps and run-ahead deadlocks; groups finish in random order."""
    rng = random.Random(seed)
    max_lag = eta + extra
    running: dict[int, Ready] = {}
    finished: dict[int, Ready] = {}
    started = dropped = version = 0
    trained: list[int] = []
    idle = 0
    while version < steps:
        counts = Progress(started=started, dropped=dropped, published=version * n)
        while may_start(counts, groups_per_step=n, eta=eta, total_steps=steps):
            running[started] = Ready(ordinal=started, version=version)
            started += 1
            counts = Progress(started=started, dropped=dropped, published=version * n)
        batch = next_batch(
            finished.values(), running.values(), groups_per_step=n, version=version, max_lag=max_lag
        )
        if batch is not None:
            for ordinal in batch:
                group = finished.pop(ordinal)
                if eta == 0:
                    assert group_lag(group.version, training_version=version) == 0
            trained += batch
            version += 1
            continue
        assert running, "nothing runs and nothing can be trained: a deadlock"
        group = running.pop(rng.choice(sorted(running)))
        if rng.random() < 0.2 and idle < 50:
            dropped += 1
            idle += 1
        else:
            finished[group.ordinal] = group
    assert len(trained) == len(set(trained)) == steps * n
    assert not running and not finished


def test_synchronous_batches_do_not_depend_on_the_order_in_which_groups_finish():
    """At eta = 0 a step trains the first N informative ordinals, whatever finishes first."""
    uninformative = {1, 4, 9}

    def batches(rng: random.Random) -> list[tuple[int, ...]]:
        running: set[int] = set()
        finished: set[int] = set()
        out: list[tuple[int, ...]] = []
        started = dropped = 0
        while len(out) < 2:
            while may_start(
                Progress(started=started, dropped=dropped, published=4 * len(out)),
                groups_per_step=4,
                eta=0,
                total_steps=2,
            ):
                running.add(started)
                started += 1
            version = len(out)
            batch = next_batch(
                [Ready(ordinal=o, version=version) for o in finished],
                [Ready(ordinal=o, version=version) for o in running],
                groups_per_step=4,
                version=version,
                max_lag=0,
            )
            if batch is not None:
                finished -= set(batch)
                out.append(batch)
                continue
            ordinal = rng.choice(sorted(running))
            running.remove(ordinal)
            if ordinal in uninformative:
                dropped += 1
            else:
                finished.add(ordinal)
        return out

    results = {tuple(batches(random.Random(seed))) for seed in range(20)}
    assert results == {((0, 2, 3, 5), (6, 7, 8, 10))}
