"""The router on simulated replicas, in virtual time: counts, fail-over, pressure, every refusal."""

import asyncio
import gc
import logging
import pickle
import random
import tracemalloc
from dataclasses import replace

import pytest

from treadle.errors import ConfigError, SamplerError
from treadle.sampler.router import (
    NoPlace,
    NoReplica,
    Router,
    RouterLimits,
    SessionExpired,
    SessionUnknown,
    TurnLost,
)
from treadle.sampler.simulated import CostModel, SimulatedEngine
from treadle.sampler.virtual_time import run_virtual
from treadle.schedule.concurrency import ConcurrencySettings
from treadle.schedule.routing import Caps, ConsistentHash, PrefixAffinity, Rules
from treadle.types import Replica, SamplingParams, StopReason

COST = CostModel(
    step_s=0.01,
    row_s=0.001,
    context_s=1e-6,
    prefill_s=1e-3,
    prefill_context_s=0.0,
    kv_tokens=10_000,
)
PARAMS = SamplingParams(max_new_tokens=20)
NO_MOVES = RouterLimits(move_margin=None)


def engines(count=4, **more):
    return {f"r{i}": SimulatedEngine(COST, name=f"r{i}", **more) for i in range(count)}


def prompt_of(session, length=50):
    rng = random.Random(session)
    return tuple(rng.randrange(1000) for _ in range(length))


async def rollout(router, session, turns=3, pause_s=0.0, group="", release=True):
    """A session's ids and completions."""
    await router.open(session, group=group)
    ids, completions = prompt_of(session), []
    for index in range(turns):
        params = SamplingParams(max_new_tokens=20, seed=index)
        completion = await router.sample(session, ids, params)
        assert len(completion.ids) == 20
        completions.append(completion)
        ids += (*completion.ids, 1, 2, 3)
        await asyncio.sleep(pause_s)
    if release:
        await router.release(session)
    return completions


async def assert_nothing_is_left(router, replicas):
    stats = router.stats()
    assert (stats.sessions, stats.placed, stats.waiting, stats.turns, stats.orphans) == (0,) * 5
    assert set(stats.per_replica.values()) == {0}
    assert not router._sessions and not router._places.first and not router._places.new
    for handle in router._handles:
        assert not handle.members and not handle.groups and not handle.scopes
    for engine in replicas.values():
        load = await engine.load()
        assert (load.running, load.waiting, load.sessions, engine.kv_used) == (0, 0, 0, 0)


def test_sessions_stay_where_they_were_opened_and_reuse_their_kv():
    async def main():
        replicas = engines()
        async with Router(replicas, limits=NO_MOVES) as router:
            assert isinstance(router, Replica)
            await router.open("a")
            home = router.where("a")
            first = await router.sample("a", prompt_of("a"), PARAMS)
            for index in range(8):
                await router.open(f"other{index}")
            ids = prompt_of("a") + first.ids
            second = await router.sample("a", (*ids, 5), PARAMS)
            assert router.where("a") == home and second.cached_tokens == len(ids)
            counts = router.stats().per_replica
            assert sorted(counts.values()) == [2, 2, 2, 3]

    run_virtual(main())


def test_a_burst_of_opens_spreads_before_any_load_is_seen():
    """B182, B185: counted from the decision on, not from the first answer."""

    async def main():
        async with Router(engines()) as router:
            await asyncio.gather(*(router.open(f"s{i}") for i in range(200)))
            assert set(router.stats().per_replica.values()) == {50}

    run_virtual(main())


def test_release_is_idempotent_and_frees_place_and_kv():
    async def main():
        replicas = engines(1)
        router = Router(replicas, caps=Caps(max_context=10_000))
        async with router:
            await router.open("a")
            await router.sample("a", prompt_of("a"), PARAMS)
            waiting = asyncio.ensure_future(router.open("b"))
            await asyncio.sleep(1)
            assert not waiting.done() and router.stats().waiting == 1, "the cap is 1"
            await router.release("a")
            await router.release("a")
            await router.release("never opened")
            await waiting
            assert router.stats().released == 1
            await router.release("b")
            await assert_nothing_is_left(router, replicas)

    run_virtual(main())


@pytest.mark.parametrize("when", ["between turns", "in a turn", "frozen in a turn"])
def test_a_session_of_a_lost_replica_goes_on_elsewhere_with_its_ids(when):
    """B178: the next turn on another replica with the full history, the turn recorded once."""

    async def main():
        replicas = engines(2)
        async with Router(replicas, limits=RouterLimits(move_margin=None)) as router:
            await router.open("a")
            first = await router.sample("a", prompt_of("a"), SamplingParams(max_new_tokens=20))
            home = router.where("a")
            ids = (*prompt_of("a"), *first.ids, 9)
            if when == "between turns":
                replicas[home].kill()
            turn = asyncio.ensure_future(
                router.sample("a", ids, SamplingParams(max_new_tokens=1000, seed=7))
            )
            await asyncio.sleep(0.5)
            if when == "in a turn":
                replicas[home].kill()
            if when == "frozen in a turn":
                replicas[home].freeze()
            second = await turn
            assert router.where("a") != home
            stats = router.stats()
            assert (stats.failovers, stats.losses, stats.completed) == (1, 1, 2)
            # What was returned stays true: the same draw as on a replica that lives.
            other = SimulatedEngine(COST)
            await other.open("x")
            again = await other.sample("x", ids, SamplingParams(max_new_tokens=1000, seed=7))
            assert second.ids == again.ids and second.prompt_tokens == len(ids)
            # The dead one comes back: healthy again, and rid of what it held.
            replicas[home].revive()
            await asyncio.sleep(20)
            stats = router.stats()
            assert (stats.healthy, stats.readmissions, stats.orphans) == (2, 1, 0)
            await router.open("b")
            assert router.where("b") == home
            await router.release("a")
            await router.release("b")
            await assert_nothing_is_left(router, replicas)

    run_virtual(main())


def test_replicas_that_die_under_load_lose_no_turn():
    async def main():
        replicas = engines(4)
        chaos = random.Random(3)

        async def trouble():
            for _ in range(12):
                await asyncio.sleep(chaos.uniform(5, 20))
                victim = chaos.choice(list(replicas.values()))
                chaos.choice([victim.kill, victim.freeze])()
                await asyncio.sleep(chaos.uniform(1, 30))
                victim.revive()

        async with Router(replicas) as router:
            storm = asyncio.ensure_future(trouble())
            done = await asyncio.gather(
                *(
                    rollout(router, f"s{i}", turns=40, pause_s=1.0, group=f"{i % 7}")
                    for i in range(40)
                )
            )
            await storm
            await asyncio.sleep(60)
            stats = router.stats()
            assert stats.failovers > 0 and stats.retried_turns > 0 and stats.healthy == 4
            assert stats.completed == 40 * 40
            await assert_nothing_is_left(router, replicas)
        return done

    for completions in run_virtual(main()):
        assert len(completions) == 40


def test_a_restart_between_two_checks_is_noticed_by_the_turn():
    async def main():
        replicas = engines(1)
        async with Router(replicas) as router:
            await router.open("a")
            await router.sample("a", prompt_of("a"), PARAMS)
            replicas["r0"].kill()
            replicas["r0"].revive()
            completion = await router.sample("a", prompt_of("a"), PARAMS)
            assert len(completion.ids) == 20
            await router.release("a")
            await assert_nothing_is_left(router, replicas)

    run_virtual(main())


def test_an_empty_pool_is_said_and_recovers_without_a_restart():
    """B180."""

    async def main():
        replicas = engines(2)
        async with Router(replicas) as router:
            await router.open("a")
            for engine in replicas.values():
                engine.kill()
            with pytest.raises(NoReplica, match="none of 2 replicas"):
                await router.sample("a", prompt_of("a"), PARAMS)
            with pytest.raises(NoReplica, match="none of 2 replicas"):
                await router.open("b")
            with pytest.raises(NoReplica):
                await router.score([1, 2, 3], 1)
            with pytest.raises(NoReplica):
                await router.load()
            assert router.stats().refused == 2
            replicas["r1"].revive()
            await asyncio.sleep(15)
            assert len((await router.sample("a", prompt_of("a"), PARAMS)).ids) == 20
            await router.release("a")
            replicas["r0"].revive()
            await asyncio.sleep(20)
            await assert_nothing_is_left(router, replicas)

    run_virtual(main())


def test_a_turn_that_kills_every_replica_is_lost_after_a_bounded_number():
    class Cursed(SimulatedEngine):
        async def sample(self, session, prompt, params):
            self.kill("died of the prompt")
            return await super().sample(session, prompt, params)

    async def main():
        replicas = {f"r{i}": Cursed(COST, name=f"r{i}") for i in range(8)}
        async with Router(replicas) as router:
            await router.open("a")
            with pytest.raises(TurnLost, match="lost 4 replicas") as caught:
                await router.sample("a", prompt_of("a"), PARAMS)
            assert router.stats().losses == 4
            return caught.value

    error = run_virtual(main())
    assert type(pickle.loads(pickle.dumps(error))) is TurnLost


def test_errors_of_the_request_are_the_callers_and_cost_no_replica():
    async def main():
        replicas = engines(2)
        async with Router(replicas) as router:
            await router.open("a")
            with pytest.raises(SamplerError, match="does not fit"):
                await router.sample("a", [], PARAMS)
            with pytest.raises(SamplerError, match="already open"):
                await router.open("a")
            with pytest.raises(SessionUnknown, match="not open"):
                await router.sample("b", [1], PARAMS)
            turn = asyncio.ensure_future(router.sample("a", [1], PARAMS))
            await asyncio.sleep(0)
            with pytest.raises(SamplerError, match="middle of a turn"):
                await router.sample("a", [1], PARAMS)
            assert len((await turn).ids) == 20
            stats = router.stats()
            assert (stats.healthy, stats.failovers, stats.moves) == (2, 0, 0)
            assert await router.score([1, 2, 3], 1) == (await replicas["r0"].score([1, 2, 3], 1))
        with pytest.raises(SamplerError, match="was closed"):
            await router.open("c")

    run_virtual(main())
    with pytest.raises(ConfigError, match="at least one"):
        Router({})


def test_a_deadline_counts_the_wait_for_a_place_and_a_hung_replica_does_not_outlast_it():
    async def main():
        replicas = engines(1)
        async with Router(replicas, rules=Rules(failures=10**9)) as router:
            await router.open("a")
            replicas["r0"].freeze()
            began = asyncio.get_running_loop().time()
            completion = await router.sample(
                "a", [1], SamplingParams(max_new_tokens=5, deadline_s=60)
            )
            waited = asyncio.get_running_loop().time() - began
            assert completion.stop_reason is StopReason.ABORTED and completion.ids == ()
            assert 60 <= waited <= 75
            replicas["r0"].revive()
            await asyncio.sleep(20)
            await router.release("a")
            await assert_nothing_is_left(router, replicas)

    run_virtual(main())


def test_opens_wait_for_a_place_in_order_and_give_up_in_time():
    async def main():
        replicas = engines(1)
        limits = RouterLimits(open_limit_s=100)
        router = Router(replicas, caps=Caps(max_context=10_000), limits=limits)
        async with router:
            await router.open("a")
            order = []

            async def opened(name):
                await router.open(name)
                order.append(name)
                await router.release(name)

            calls = [asyncio.ensure_future(opened(n)) for n in "bcd"]
            await asyncio.sleep(1)
            with pytest.raises(NoPlace, match="r0: 1 of 1"):
                await router.open("e")
            assert [c.done() for c in calls] == [True] * 3
            assert all(isinstance(c.exception(), NoPlace) for c in calls)
            calls = [asyncio.ensure_future(opened(n)) for n in "fgh"]
            await asyncio.sleep(1)
            calls[0].cancel()
            await asyncio.sleep(0)
            await router.release("a")
            await asyncio.gather(*calls, return_exceptions=True)
            assert order == ["g", "h"]
            await assert_nothing_is_left(router, replicas)

    run_virtual(main())


def test_callers_that_leave_at_any_moment_bring_all_counts_back_to_zero():
    """B176, B177: opens and turns cancelled at random moments, half of the sessions then freed
    by their owner and half by their time to live."""

    async def main():
        replicas = engines(4)
        rng = random.Random(1)
        limits = RouterLimits(ttl_s=600)
        async with Router(replicas, caps=Caps(max_context=500), limits=limits) as router:

            async def fickle(name):
                task = asyncio.ensure_future(
                    rollout(router, name, turns=5, group=name[-1], release=False)
                )
                await asyncio.wait({task}, timeout=rng.choice([0, 0.01, 0.2, 1.0, 5.0, 1e4]))
                task.cancel()
                await asyncio.wait({task})
                if rng.random() < 0.5:
                    await router.release(name)

            await asyncio.gather(*(fickle(f"s{i}") for i in range(300)))
            stats = router.stats()
            assert stats.turns == stats.waiting == 0
            assert [(await e.load()).running for e in replicas.values()] == [0] * 4
            await asyncio.sleep(700)
            assert router.stats().expired == stats.sessions > 50
            await assert_nothing_is_left(router, replicas)
            # New load is level.
            await asyncio.gather(*(router.open(f"n{i}") for i in range(80)))
            assert set(router.stats().per_replica.values()) == {20}

    run_virtual(main())


def test_a_thousand_abandoned_sessions_expire_and_leave_no_memory_behind(caplog):
    """B186."""
    caplog.set_level(logging.ERROR, logger="treadle.sampler.router")  # kept lines are memory too

    async def main():
        replicas = engines(4)
        async with Router(replicas, limits=RouterLimits(ttl_s=100)) as router:

            async def abandon(round_, count):
                for index in range(count):
                    name = f"{round_}/{index}"
                    await router.open(name, group=f"{round_}/{index // 8}")
                    if index % 3 == 0:
                        await router.sample(name, prompt_of(name), PARAMS)
                await asyncio.sleep(300)
                with pytest.raises(SessionExpired, match="100 s"):
                    await router.sample(name, [1], PARAMS)
                router._expired.clear()
                gc.collect()

            await abandon("warm", 1000)
            await assert_nothing_is_left(router, replicas)
            tracemalloc.start()
            await abandon("before", 1000)
            before, _ = tracemalloc.get_traced_memory()
            for round_ in range(2):
                await abandon(round_, 1000)
            after, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            await assert_nothing_is_left(router, replicas)
            assert router.stats().expired == 4000
            return after - before

    grown = run_virtual(main())
    assert grown < 40_000, f"{grown} bytes for 2,000 sessions"


def test_a_release_in_a_turn_aborts_it_and_an_open_can_be_released():
    async def main():
        replicas = engines(1)
        async with Router(replicas, caps=Caps(max_context=10_000)) as router:
            await router.open("a")
            turn = asyncio.ensure_future(
                router.sample("a", [1], SamplingParams(max_new_tokens=5000))
            )
            opening = asyncio.ensure_future(router.open("b"))
            await asyncio.sleep(1)
            await router.release("b")
            with pytest.raises(SessionUnknown, match="while it was opened"):
                await opening
            await router.release("a")
            assert (await turn).stop_reason is StopReason.ABORTED
            await assert_nothing_is_left(router, replicas)

    run_virtual(main())


@pytest.mark.parametrize("way", ["release", "cancel", "kill"])
def test_a_session_that_ends_while_its_replica_opens_it_leaves_nothing_there(way):
    class SlowToOpen(SimulatedEngine):
        async def open(self, session, *, group=""):
            await asyncio.sleep(1)
            await super().open(session, group=group)
            await asyncio.sleep(1)

    async def main():
        replicas = {"r0": SlowToOpen(COST)}
        async with Router(replicas) as router:
            opening = asyncio.ensure_future(router.open("a", group="g"))
            await asyncio.sleep(0.5)
            if way == "release":
                await router.release("a")
            if way == "cancel":
                await asyncio.sleep(1)
                opening.cancel()
            if way == "kill":
                replicas["r0"].kill()
                await asyncio.sleep(11)
                replicas["r0"].revive()
            (outcome,) = await asyncio.gather(opening, return_exceptions=True)
            if way == "kill":
                assert outcome is None and router.where("a") == "r0"
                await router.release("a")
            else:
                assert isinstance(outcome, SessionUnknown | asyncio.CancelledError)
            await asyncio.sleep(10)
            await assert_nothing_is_left(router, replicas)

    run_virtual(main())


def test_a_measured_cap_waits_for_whole_lives_and_then_overcommits():
    """A cold start, at which all sessions are short, does not let in what cannot be held later."""

    async def main():
        replicas = engines(1, max_rows=64)
        caps, limits = Caps(max_context=2000, z=2.0, min_ended=20), RouterLimits(open_limit_s=1e5)
        router = Router(replicas, caps=caps, limits=limits)
        async with router:
            most, rng = [], random.Random(0)

            async def client(index):
                await router.open(name := f"s{index}")
                ids = prompt_of(name, 50)
                for _ in range(rng.randrange(5, 16)):
                    most.append((router.stats().placed, router.stats().released))
                    ids += (await router.sample(name, ids, PARAMS)).ids + tuple(range(70))
                    await asyncio.sleep(rng.uniform(1, 20))
                await router.release(name)

            await asyncio.gather(*(client(i) for i in range(200)))
            await assert_nothing_is_left(router, replicas)
            return most, replicas["r0"].stats()

    most, stats = run_virtual(main())
    assert max(placed for placed, released in most if released < 20) == 5, "2,000 tokens each"
    assert 10 <= max(placed for placed, _ in most) <= 18, "about 600 on average"
    assert stats.repeated_tokens < 0.05 * stats.prefill_tokens


def test_a_replica_that_cannot_release_is_asked_again():
    async def main():
        replicas = engines(1)
        refusing = True

        class Stubborn(SimulatedEngine):
            async def release(self, session):
                if refusing:
                    raise SamplerError("not now")
                await super().release(session)

        replicas = {"r0": Stubborn(COST)}
        async with Router(replicas) as router:
            await router.open("a")
            await router.release("a")
            assert router.stats().per_replica == {"r0": 0} and router.stats().orphans == 1
            await router.open("a")  # the same name while the old one lingers
            await router.sample("a", [1], PARAMS)
            await router.release("a")
            refusing = False
            await asyncio.sleep(6)
            await assert_nothing_is_left(router, replicas)

    run_virtual(main())


def test_idle_sessions_move_off_a_replica_under_pressure_and_are_counted():
    """B183, B192: a stranger fills one; ours leave at their next turn, new ones avoid it."""

    async def main():
        replicas = engines(2)
        async with Router(replicas) as router:
            for index in range(4):
                await router.open(f"s{index}")
            pressed = replicas["r0"]
            await pressed.open("stranger")
            await pressed.sample("stranger", range(9800), PARAMS)
            await asyncio.sleep(6)
            assert router.stats().quarantined == 1 and router.stats().quarantines == 1
            for index in range(4):
                await router.sample(f"s{index}", prompt_of(index), PARAMS)
            stats = router.stats()
            assert (stats.moves, stats.per_replica) == (2, {"r0": 0, "r1": 4})
            await router.open("new")
            assert router.where("new") == "r1"
            await pressed.release("stranger")
            await asyncio.sleep(60)
            assert router.stats().quarantined == 0
            await router.open("newer")
            assert router.where("newer") == "r0"
            for index in range(4):
                await router.release(f"s{index}")
            await router.release("new")
            await router.release("newer")
            await assert_nothing_is_left(router, replicas)

    run_virtual(main())


def test_a_long_tail_on_one_replica_is_spread_when_the_others_are_empty():
    """B183: 8 long sessions pinned to one of 4; at rest nothing moves any more."""

    async def main():
        replicas = engines(4)
        async with Router(replicas, policy=ConsistentHash()) as router:
            names, index = [], 0
            while len(names) < 8:
                await router.open(f"s{index}")
                if router.where(f"s{index}") == "r2":
                    names.append(f"s{index}")
                else:
                    await router.release(f"s{index}")
                index += 1
            for _ in range(3):
                for name in names:
                    await router.sample(name, prompt_of(name), PARAMS)
            stats = router.stats()
            assert max(stats.per_replica.values()) - min(stats.per_replica.values()) < 4
            assert 3 <= stats.moves <= 6

    run_virtual(main())


def test_a_poisoned_replica_is_held_back_and_taken_back_on_probation():
    async def main():
        replicas = engines(4)
        async with Router(replicas) as router:
            rounds = 0

            async def work(seconds):
                nonlocal rounds
                end = asyncio.get_running_loop().time() + seconds

                async def client(index):
                    nonlocal rounds
                    while asyncio.get_running_loop().time() < end:
                        rounds += 1
                        await rollout(router, f"{rounds}/{index}", turns=4, pause_s=0.5)

                await asyncio.gather(*(client(i) for i in range(16)))

            await work(60)
            replicas["r1"].slow(20.0)
            await work(60)
            held = router.stats()
            replicas["r1"].slow(1.0)
            await work(200)
            stats = router.stats()
            await assert_nothing_is_left(router, replicas)
            return held, stats, router

    held, stats, router = run_virtual(main())
    assert held.quarantines >= 1 and held.losses == 0
    assert stats.quarantines <= held.quarantines + 1, "cured, it is not judged by old turns"
    assert stats.quarantined == 0 and not any(h.standing.probation for h in router._handles)


def test_groups_stay_together_by_prefix_affinity():
    async def main():
        async with Router(engines(4), policy=PrefixAffinity()) as router:
            homes = []
            for group in range(8):
                for sample in range(4):
                    await router.open(f"{group}/{sample}", group=str(group))
                homes.append({router.where(f"{group}/{sample}") for sample in range(4)})
            return homes, router.stats().per_replica

    homes, counts = run_virtual(main())
    assert sum(len(h) for h in homes) <= 20, "of 32, were they spread"
    assert max(counts.values()) <= 8 + 4


def test_the_controller_bounds_parks_and_lets_everybody_finish():
    """Histories outgrow the KV after a start that looked harmless; nothing is lost by parking."""

    async def main():
        replicas = engines(4, max_rows=64)
        settings = ConcurrencySettings(at_most=200, max_context=1500)
        async with Router(replicas, concurrency=settings) as router:
            assert router.stats().limit == 4 * 10_000 // 1500
            most = 0

            async def client(index):
                nonlocal most
                name = f"s{index}"
                await router.open(name)
                ids = prompt_of(name, 40)
                for turn in range(12):
                    most = max(most, router.stats().placed)
                    params = SamplingParams(max_new_tokens=10, seed=turn, deadline_s=1e5)
                    completion = await router.sample(name, ids, params)
                    assert len(completion.ids) == 10
                    ids += (*completion.ids, *range(100))
                    await asyncio.sleep(0.5)
                await router.release(name)

            await asyncio.gather(*(client(i) for i in range(400)))
            stats = router.stats()
            await assert_nothing_is_left(router, replicas)
            evicted = sum(e.stats().evicted_tokens for e in replicas.values())
            return most, stats, evicted

    most, stats, evicted = run_virtual(main())
    assert most <= 200 and stats.completed == 400 * 12
    assert stats.limit >= 26 and stats.parked == 0
    assert evicted < 0.02 * 400 * 12 * 1000


def test_parked_sessions_are_the_youngest_idle_ones_and_come_back():
    async def main():
        replicas = {"r0": SimulatedEngine(replace(COST, prefill_s=1e-6))}
        settings = ConcurrencySettings(at_most=20, max_context=2000)
        async with Router(replicas, concurrency=settings) as router:
            router._places.control = replace(
                router._places.control, cap=10.0
            )  # as after a calm time
            for index in range(10):
                await router.open(f"s{index}")
                await router.sample(f"s{index}", prompt_of(index, 900), PARAMS)
            await asyncio.sleep(6)  # 92% of the KV is held
            parked = [f"s{i}" for i in range(10) if router.where(f"s{i}") is None]
            stats = router.stats()
            assert parked == ["s7", "s8", "s9"][-stats.parked :] and stats.parks == len(parked) > 0
            late = asyncio.ensure_future(router.sample("s9", prompt_of(9, 900), PARAMS))
            fresh = asyncio.ensure_future(router.open("new"))
            await asyncio.sleep(5)
            assert not late.done() and not fresh.done()
            for index in range(5):
                await router.release(f"s{index}")
            await late
            for name in ["new", *(f"s{i}" for i in range(5, 10))]:
                await router.release(name)
            await asyncio.gather(fresh, return_exceptions=True)
            await assert_nothing_is_left(router, replicas)

    run_virtual(main())


def test_a_score_on_a_replica_that_hangs_is_answered_by_another():
    async def main():
        replicas = engines(2)
        async with Router(replicas) as router:
            replicas["r0"].freeze()
            replicas["r1"].freeze()
            score = asyncio.ensure_future(router.score([1, 2, 3], 1))
            await asyncio.sleep(1)
            replicas["r1"].revive()
            assert len(await score) == 2
            assert router.stats().turns == 0

    run_virtual(main())


def test_a_health_check_that_raises_anything_at_all_is_no_answer():
    class Odd(SimulatedEngine):
        broken = False

        async def load(self):
            if self.broken:
                raise OSError("connection reset")
            return await super().load()

    async def main():
        replicas = {f"r{i}": Odd(COST, name=f"r{i}") for i in range(2)}
        async with Router(replicas) as router:
            await router.open("a")
            home = router.where("a")
            replicas[home].broken = True
            await asyncio.sleep(20)
            assert router.stats().healthy == 1 and router.stats().losses == 1
            assert len((await router.sample("a", [1], PARAMS)).ids) == 20
            assert router.where("a") != home
            replicas[home].broken = False
            await asyncio.sleep(20)
            await router.release("a")
            await assert_nothing_is_left(router, replicas)

    run_virtual(main())


def test_capabilities_and_version_are_what_all_replicas_have():
    async def main():
        replicas = engines(2)
        replicas["r1"].version = 4
        async with Router(replicas) as router:
            assert router.version == 0
            replicas["r0"].kill()
            await asyncio.sleep(30)
            assert router.version == 4
            assert router.capabilities == replicas["r0"].capabilities

    run_virtual(main())


def test_routers_nest():
    async def main():
        left, right = engines(2), engines(2)
        async with Router(left) as a, Router(right) as b, Router({"a": a, "b": b}) as top:
            await asyncio.gather(*(rollout(top, f"s{i}") for i in range(20)))
            for engine in left.values():
                engine.kill()
            await asyncio.sleep(30)
            assert top.stats().healthy == 1
            await asyncio.gather(*(rollout(top, f"t{i}") for i in range(20)))
            assert top.stats().sessions == a.stats().sessions == b.stats().sessions == 0

    run_virtual(main())
