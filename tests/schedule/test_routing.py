"""Routing decisions: worked by hand, against the closed form, and on random pools."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.schedule.routing import (
    Caps,
    ConsistentHash,
    LeastSessions,
    Life,
    PowerOfTwo,
    PrefixAffinity,
    Resident,
    Rules,
    Snapshot,
    Standing,
    better_home,
    check_failed,
    check_passed,
    overcommit_cap,
    place,
    safe_cap,
)
from treadle.types import SamplerLoad

POLICIES = [LeastSessions(), PowerOfTwo(), PrefixAffinity(), ConsistentHash()]


def pool(*sessions, **more):
    return [Snapshot(name=f"r{i}", sessions=n, **more) for i, n in enumerate(sessions)]


def load(**more):
    fields = dict.fromkeys(SamplerLoad.__dataclass_fields__, 0) | {"kv_tokens": 1000} | more
    return SamplerLoad(**fields)


def placed(policy, sessions, replicas, group=lambda i: ""):
    """Counts after placing sessions one after another."""
    names = {view.name: view for view in pool(*[0] * replicas)}
    for index in range(sessions):
        view = place(names.values(), policy, session=f"s{index}", group=group(index))
        groups = (*view.groups, group(index)) if group(index) else ()
        names[view.name] = replace(view, sessions=view.sessions + 1, groups=groups)
    return [view.sessions for view in names.values()]


def test_least_sessions_takes_the_emptiest_and_spreads_ties():
    assert place(pool(3, 1, 2), LeastSessions(), session="a").name == "r1"
    # B182: 200 sessions on 4 idle replicas.
    assert placed(LeastSessions(), 200, 4) == [50] * 4
    first = [place(pool(0, 0, 0, 0), LeastSessions(), session=f"s{i}").name for i in range(400)]
    assert all(60 <= first.count(f"r{i}") <= 140 for i in range(4)), "ties are not list order"


def test_least_sessions_counts_per_unit_of_cap():
    big = Snapshot(name="big", sessions=30, cap=100)
    small = Snapshot(name="small", sessions=8, cap=20)
    assert place([big, small], LeastSessions(), session="a") is big


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: type(p).__name__)
def test_health_and_pressure_and_caps_come_before_every_policy(policy):
    """B178, B192: no affinity and no count sends a session where it cannot be served."""
    views = [
        Snapshot(name="dead", healthy=False, groups=("g",) * 5),
        Snapshot(name="pressed", sessions=2, quarantined=True, kv_usage=0.97, groups=("g",)),
        Snapshot(name="full", sessions=4, cap=4, groups=("g",) * 4),
        Snapshot(name="fit", sessions=50),
    ]
    for index in range(50):
        assert place(views, policy, session=f"s{index}", group="g").name == "fit"
    assert place(views[:3], policy, session="s", group="g") is None
    assert place([], policy, session="s") is None


def test_hashing_is_as_uneven_as_its_closed_form_says_and_least_sessions_is_not():
    """1 + sqrt(2 ln R / m), R = 16 replicas, m = 64 sessions each: 1.29; sampled 1.22, more with
    a ring of finitely many points."""

    def skew(policy):
        counts = placed(policy, 1024, 16)
        return max(counts) / (sum(counts) / 16)

    bound = 1 + math.sqrt(2 * math.log(16) / 64)
    assert 1.10 < skew(ConsistentHash(virtual_nodes=4096)) < bound + 0.1
    assert skew(ConsistentHash()) > 1.15
    assert skew(LeastSessions()) == 1.0
    assert 1.0 <= skew(PowerOfTwo()) < 1.10


def test_consistent_hashing_moves_only_the_sessions_of_a_lost_replica():
    views = pool(*[0] * 8)
    before = {f"s{i}": place(views, ConsistentHash(), session=f"s{i}").name for i in range(500)}
    left = [view for view in views if view.name != "r3"]
    for session, home in before.items():
        after = place(left, ConsistentHash(), session=session).name
        assert after == home or home == "r3"


def test_prefix_affinity_keeps_groups_together_while_the_balance_lasts():
    counts = placed(PrefixAffinity(), 512, 8, group=lambda i: f"g{i // 8}")
    assert max(counts) <= 1.3 * 64
    views = [Snapshot(name="home", sessions=10, groups=("g",)), Snapshot(name="empty", sessions=9)]
    assert place(views, PrefixAffinity(), session="s", group="g").name == "home"
    views[0] = replace(views[0], sessions=14)
    assert place(views, PrefixAffinity(), session="s", group="g").name == "empty"


def test_an_idle_session_leaves_a_replica_under_pressure_or_with_a_large_surplus():
    views = pool(8, 0, 0, 0)
    assert better_home(views[0], views, session="s").name != "r0"
    pressed = [Snapshot(name="a", sessions=2, quarantined=True), Snapshot(name="b", sessions=9)]
    assert better_home(pressed[0], pressed, session="s").name == "b"
    pressed[1] = replace(pressed[1], cap=9)
    assert better_home(pressed[0], pressed, session="s") is None, "nowhere to go"
    near = pool(5, 2, 2, 2)
    assert better_home(near[0], near, session="s") is None
    assert better_home(views[0], views, session="s", margin=None) is None


@settings(deadline=None)
@given(st.lists(st.integers(0, 60), min_size=2, max_size=12), st.integers(2, 8))
def test_moving_always_comes_to_rest(counts, margin):
    """B183: moved under a stated margin, and a balanced state does not thrash."""
    views = {view.name: view for view in pool(*counts)}
    for _ in range(sum(counts) + 1):
        moves = [
            (view, target)
            for view in views.values()
            if (target := better_home(view, views.values(), session="s", margin=margin))
        ]
        if not moves:
            break
        source, target = moves[0]
        views[source.name] = replace(source, sessions=source.sessions - 1)
        views[target.name] = replace(target, sessions=target.sessions + 1)
    else:
        raise AssertionError("it never comes to rest")
    left = [view.sessions for view in views.values()]
    assert sum(left) == sum(counts)
    mean = sum(left) / len(left)
    assert max(left) - min(left) < max(margin, 2, math.ceil(0.25 * mean))


def test_caps_worked_by_hand():
    assert safe_cap(350_000, 32_768) == 10
    assert safe_cap(1000, 4096) == 1
    # n*100 + 2*50*sqrt(n) <= 10,000: 90*100 + 100*9.49 = 9,949; 91 gives 10,054.
    assert overcommit_cap(10_000, mean_tokens=100, std_tokens=50, z=2) == 90
    assert overcommit_cap(10_000, mean_tokens=100, std_tokens=0, z=2) == 100
    assert overcommit_cap(50, mean_tokens=100, std_tokens=0, z=2) == 0


@settings(deadline=None)
@given(st.integers(1, 10**7), st.floats(1, 1e5), st.floats(0, 1e5), st.floats(0, 4))
def test_the_overcommitted_cap_is_the_largest_that_fits(kv_tokens, mean, std, z):
    n = overcommit_cap(kv_tokens, mean_tokens=mean, std_tokens=std, z=z)

    def need(k):
        return k * mean + z * std * math.sqrt(k)

    assert need(n) <= kv_tokens * (1 + 1e-9) and need(n + 1) > kv_tokens * (1 - 1e-9)


def test_the_life_of_a_session_worked_by_hand():
    life = Life(since_s=10.0).grown(100, now_s=12.0).grown(300, now_s=15.0).grown(300, now_s=16.0)
    assert (life.tokens, life.seconds) == (300, 6.0)
    assert life.area == 0 * 2 + 100 * 3 + 300 * 1
    assert life.squares == 100**2 * 3 + 300**2 * 1
    resident = Resident().observe(life)
    assert resident.mean == 100.0
    assert resident.std == pytest.approx(math.sqrt(120_000 / 6 - 100**2))


def test_a_measured_cap_overcommits_what_evenly_growing_sessions_leave_free():
    """A session that grows evenly to L holds L/2: about twice as many fit."""
    life = Life(since_s=0.0)
    for second in range(1, 33):
        life = life.grown(second * 1024, now_s=float(second))
    resident = Resident()
    safe, measured = Caps(max_context=32_768), Caps(max_context=32_768, z=2.0)
    for _ in range(63):
        resident = resident.observe(life)
    at_start = {"before": 0.0, "step_s": 1e9}
    assert measured.cap(350_000, resident, **at_start) == 10, "too few have ended to believe it"
    for _ in range(200):
        resident = resident.observe(life)
    assert resident.mean == pytest.approx(16_384, rel=0.05)
    assert resident.std == pytest.approx(32_768 / math.sqrt(12), rel=0.05)
    assert safe.cap(350_000, resident, **at_start) == 10
    full = measured.cap(350_000, resident, **at_start)
    assert 15 <= full <= 19
    # A life takes 32 s: so does the way up, and none at all the way down.
    assert measured.cap(350_000, resident, before=10.0, step_s=2.0) == 10 + full * 2 / 32
    assert measured.cap(350_000, resident, before=500.0, step_s=2.0) == full


def test_a_replica_is_lost_after_two_failed_checks_and_taken_back_after_two_good_ones():
    rules = Rules()
    once = check_failed(Standing(), rules)
    assert once.healthy and not check_failed(once, rules).healthy
    lost = check_failed(Standing(), rules, certain=True)
    assert not lost.healthy
    back = check_passed(lost, rules, load(), now_s=0)
    assert not back.healthy and check_passed(back, rules, load(), now_s=5).healthy
    assert not check_passed(check_failed(back, rules), rules, load(), now_s=5).healthy
    assert check_passed(once, rules, load(), now_s=0).failures == 0


def test_quarantine_begins_at_one_pressure_and_ends_at_a_lower_one():
    rules = Rules()
    held = check_passed(Standing(), rules, load(kv_usage=0.96), now_s=100)
    assert held.quarantined
    still = check_passed(held, rules, load(kv_usage=0.85), now_s=200)
    assert still.quarantined, "between the two thresholds nothing changes"
    early = check_passed(held, rules, load(kv_usage=0.1), now_s=110)
    assert early.quarantined, "not before its time"
    assert not check_passed(still, rules, load(kv_usage=0.1), now_s=200).quarantined


def test_a_queue_for_kv_counts_when_it_lasts_and_slowness_needs_probation():
    rules = Rules()
    queue = load(running=10, waiting=6, waiting_for_kv=6)
    once = check_passed(Standing(), rules, queue, now_s=0)
    assert not once.quarantined and check_passed(once, rules, queue, now_s=5).quarantined
    slow = check_passed(Standing(), rules, load(), now_s=0, slowness=5.0)
    assert slow.quarantined and slow.probation
    back = check_passed(slow, rules, load(), now_s=31)
    assert back.probation and not back.quarantined
    assert not check_passed(back, rules, load(), now_s=36, slowness=1.1).probation
    again = check_passed(back, rules, load(), now_s=36, slowness=6.0)
    assert again.quarantined and again.until_s == 36 + 60, "twice as long"


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.floats(0, 1), st.integers(0, 9)), max_size=60))
def test_any_standing_recovers_once_a_replica_is_calm(history):
    """Neither a loss nor a quarantine is for ever, whatever came before."""
    rules, standing, now = Rules(), Standing(), 0.0
    for failed, usage, queue in history:
        now += 5
        if failed:
            standing = check_failed(standing, rules)
        else:
            seen = load(kv_usage=usage, running=4, waiting_for_kv=queue)
            standing = check_passed(standing, rules, seen, now_s=now)
    for _ in range(int(rules.max_hold_s / 5) + 4):
        now += 5
        standing = check_passed(standing, rules, load(), now_s=now)
    assert standing.healthy and not standing.quarantined
