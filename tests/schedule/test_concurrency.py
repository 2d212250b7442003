"""The controller: rules by hand, then bounds, no collapse and recovery on any pressure."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.errors import ConfigError
from treadle.schedule.concurrency import (
    ConcurrencySettings,
    Pool,
    begin,
    ended,
    observe,
)
from treadle.types import SamplerLoad

SETTINGS = ConcurrencySettings(at_most=1024, max_context=10_000)
KV = 200_000
"""Of one replica: 20 sessions at full context."""


def pool(now_s, live, usage=0.5, replicas=4, **more):
    fields = dict.fromkeys(SamplerLoad.__dataclass_fields__, 0)
    fields |= {"kv_tokens": KV, "kv_usage": usage, "running": 20} | more
    return Pool(
        now_s=now_s,
        loads={f"r{i}": SamplerLoad(**fields) for i in range(replicas)},
        live=live,
    )


def start(replicas=4, settings=SETTINGS):
    return begin(pool(0, 0, 0.0, replicas), settings)


def at(cap):
    return replace(start(), cap=float(cap))


def turnover(state, now_s, live, settings=SETTINGS):
    """Every live session ends once."""
    for _ in range(live):
        state = ended(state, settings, now_s=now_s, live=live)
    return state


def test_it_starts_with_what_fits_whatever_it_grows_to():
    assert start().limit == 4 * KV // 10_000 == 80
    assert start(settings=replace(SETTINGS, at_most=50)).limit == 50


def test_it_grows_by_a_quarter_per_turnover_while_the_cap_binds():
    state = observe(start(), pool(5, 80), SETTINGS)
    assert turnover(state, 6, 80).limit == 100
    idle = observe(start(), pool(5, 60), SETTINGS)
    assert turnover(idle, 6, 60).limit == 80, "the cap does not bind"


@pytest.mark.parametrize(
    "seen",
    [
        {"usage": 0.65},
        {"waiting_for_kv": 11, "waiting": 11},
        {"waiting": 3},
    ],
    ids=["kv", "queue for kv", "queue for the batch"],
)
def test_it_does_not_grow_under_pressure_or_while_turns_queue(seen):
    state = observe(start(), pool(5, 80, **seen), SETTINGS)
    assert turnover(state, 6, 80).limit == 80


def test_a_permission_expires_and_one_look_permits_one_step():
    state = observe(start(), pool(5, 80), SETTINGS)
    assert turnover(state, 5 + 16, 80).limit == 80
    for _ in range(5):
        state = turnover(state, 6, 80)
    assert state.limit == 100, "five turnovers between two looks are one step"


def test_soft_pressure_trims_to_what_would_use_the_target():
    state = observe(at(200), pool(100, 200, usage=0.84), SETTINGS)
    assert state.limit == int(200 * 0.7 / 0.84) == 166
    assert state.park == 0 and state.num_trims == 1


def test_hard_pressure_parks_the_surplus():
    state = observe(at(200), pool(100, 200, usage=0.95), SETTINGS)
    assert state.limit == int(200 * 0.7 / 0.95) and state.park == 200 - state.limit
    assert observe(state, pool(105, 200, usage=0.95), SETTINGS).park == 0, "once per interval"


def test_histories_count_as_pressure_even_where_the_engine_does_not_report_them():
    """Sessions that wait for their tools hold KV that some engines call free."""
    quiet = pool(100, 200, usage=0.2)
    told = replace(quiet, resident_tokens={f"r{i}": int(0.9 * KV) for i in range(4)})
    assert observe(at(200), quiet, SETTINGS).limit == 200
    assert observe(at(200), told, SETTINGS).limit == int(200 * 0.7 / 0.9)


def test_a_preemption_cuts_once_until_drained_and_settled():
    """The cascade of a controller that cuts at every look: 1,024 sessions, then 8."""
    state = at(1000)
    counter, lowest = 0, 1000
    for look in range(1, 60):  # five minutes of preemptions at every look, 5 s apart
        counter += 3
        live = max(state.limit, 1000 - 5 * look)  # it drains slowly
        state = observe(state, pool(5 * look, live, preemptions=counter), SETTINGS)
        lowest = min(lowest, state.limit)
    assert state.num_cuts <= 2 and lowest >= 400
    assert at(1000).limit == 1000


def test_a_queue_for_kv_must_last_before_it_cuts():
    queue = {"waiting": 15, "waiting_for_kv": 15}
    state = at(500)
    for now in range(0, 30, 5):
        state = observe(state, pool(100 + now, 500, **queue), SETTINGS)
    assert state.limit == 500
    state = observe(state, pool(130, 500, **queue), SETTINGS)
    assert state.limit == 450


def test_a_relapse_cuts_deeper():
    state = observe(at(500), pool(100, 500), SETTINGS)
    state = observe(state, pool(105, 500, preemptions=1), SETTINGS)
    assert state.limit == 400
    state = observe(state, pool(140, 400, preemptions=1), SETTINGS)  # drained and calm
    live = state.limit
    state = observe(state, pool(145, live, preemptions=2), SETTINGS)
    assert state.limit == live // 2


def test_a_cut_is_restored_step_by_step_once_it_is_over():
    state = observe(at(500), pool(100, 500, preemptions=0), SETTINGS)
    state = observe(state, pool(105, 500, preemptions=4), SETTINGS)
    assert state.limit == 400
    limits = []
    for look in range(8):
        state = observe(state, pool(110 + 5 * look, state.limit, preemptions=4), SETTINGS)
        limits.append(state.limit)
    assert limits[-1] == 500 and sorted(limits) == limits, "without a single turnover"


def test_the_limit_follows_replicas_that_leave_and_return():
    state = observe(at(400), pool(5, 300), SETTINGS)
    state = observe(state, pool(10, 300, replicas=3), SETTINGS)
    assert state.limit == 300
    assert observe(state, pool(15, 300), SETTINGS).limit == 400
    assert observe(state, Pool(now_s=15, loads={}, live=300), SETTINGS).limit == 1
    more = observe(state, pool(15, 300, replicas=8), SETTINGS)
    assert more.limit == 800 and more.floor == 160


def test_a_replica_that_comes_back_with_a_counter_is_no_preemption():
    state = observe(at(400), pool(5, 300, replicas=3), SETTINGS)
    assert observe(state, pool(10, 300, replicas=4, preemptions=0), SETTINGS).num_cuts == 0


def test_settings_that_contradict_each_other_are_refused():
    with pytest.raises(ConfigError, match="grow_below <= trim_to"):
        replace(SETTINGS, soft=0.5)
    with pytest.raises(ConfigError, match="at_most"):
        replace(SETTINGS, at_most=0)
    with pytest.raises(ConfigError, match="grow"):
        replace(SETTINGS, grow=1.0)


LOOKS = st.lists(
    st.tuples(
        st.floats(0, 1.2),  # usage
        st.integers(0, 40),  # waiting for KV
        st.integers(0, 3),  # new preemptions
        st.integers(0, 4),  # replicas that answer
        st.floats(0, 1.5),  # live, of the limit
        st.integers(0, 40),  # sessions that end
        st.sampled_from([1.0, 5.0, 40.0, 300.0]),  # seconds since the last look
    ),
    max_size=60,
)


def drive(state, looks, now=0.0, preempted=0):
    """Every state on the way, after any looks at all."""
    for usage, queue, preemptions, replicas, busy, ends, step in looks:
        now += step
        preempted += preemptions
        live = int(state.limit * busy)
        seen = pool(now, live, usage, replicas, waiting_for_kv=queue, waiting=queue,
                    preemptions=preempted)  # fmt: skip
        state = observe(state, seen, SETTINGS)
        yield state, now, preempted
        for _ in range(ends):
            state = ended(state, SETTINGS, now_s=now + 1, live=max(1, live))
        yield state, now, preempted


@settings(deadline=None)
@given(LOOKS)
def test_the_cap_stays_within_its_bounds_whatever_happens(looks):
    for state, _, _ in drive(start(), looks):
        assert state.floor <= state.cap <= SETTINGS.at_most
        assert 1 <= state.limit <= SETTINGS.at_most and state.park >= 0


@settings(max_examples=20, deadline=None)
@given(LOOKS)
def test_calm_engines_and_a_binding_cap_bring_it_back_to_the_top(looks):
    state, now, preempted = start(), 0.0, 0
    for state, now, preempted in drive(state, looks):  # noqa: B007, B020
        pass
    for _ in range(200):
        now += 5
        state = observe(state, pool(now, state.limit, 0.3, preemptions=preempted), SETTINGS)
        state = turnover(state, now, state.limit)
        if state.cap == SETTINGS.at_most:
            return
    raise AssertionError(f"stuck at {state}")


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0.5, 0.79), st.integers(0, 40), st.integers(0, 3)),
        min_size=1,
        max_size=20,
    )
)
def test_no_transient_shorter_than_the_patience_costs_more_than_one_cut(looks):
    """Anything that queues or preempts for up to 100 s, measured pressure apart."""
    state = observe(at(1000), pool(0, 1000), SETTINGS)
    counter = 0
    for index, (usage, queue, preemptions) in enumerate(looks):
        counter += preemptions
        seen = pool(5.0 * (index + 1), min(1000, state.limit), usage, waiting_for_kv=queue,
                    waiting=queue, preemptions=counter)  # fmt: skip
        state = observe(state, seen, SETTINGS)
        calm = queue <= 10 and not preemptions
        if calm and state.num_cuts:
            break  # the transient is over
    assert state.num_cuts <= 1 and state.limit >= 800
