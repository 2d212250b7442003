"""The simulated engine: hand-worked times and memory, invariants on random traffic, faults."""

import asyncio
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.errors import ConfigError, ContractError, SamplerError
from treadle.sampler.simulated import (
    QWEN3_8B_H100,
    CostModel,
    SimulatedEngine,
    fit_decode,
)
from treadle.sampler.virtual_time import run_virtual
from treadle.types import Replica, SamplingParams, StopReason

# Powers of two, so that sums are exact: a step 1 s, a row 1/4 s, a token of context 1/1024 s,
# a prompt token 1/16 s.
COST = CostModel(
    step_s=1.0, row_s=0.25, context_s=2**-10, prefill_s=2**-4, prefill_context_s=0.0, kv_tokens=4096
)


def params(new, **more):
    return SamplingParams(max_new_tokens=new, deadline_s=more.pop("deadline_s", 1e6), **more)


def now():
    return asyncio.get_running_loop().time()


def held(engine):
    """KV tokens by the definition, to compare with the engine's running count."""
    own = sum(s.own for s in engine._sessions.values())
    return own + sum(len(g.ids) for g in engine._groups.values() if g.sharers)


def test_time_leaps_over_waits_and_a_program_that_cannot_go_on_ends():
    async def hours():
        await asyncio.sleep(7200)
        return now()

    assert run_virtual(hours()) == 7200

    async def stuck():
        await asyncio.Event().wait()

    with pytest.raises(ContractError, match="everything waits"):
        run_virtual(stuck())


def test_one_turn_takes_the_time_worked_out_by_hand():
    async def main():
        engine = SimulatedEngine(COST)
        await engine.open("a")
        completion = await engine.sample("a", range(16), params(3))
        return completion, now()

    completion, seconds = run_virtual(main())
    # 16 prompt tokens and, in the same step, one empty decode step; its last position gives the
    # first token. Then two steps of one row at 17 and 18 tokens of context.
    assert seconds == (16 / 16 + 1) + (1.25 + 17 / 1024) + (1.25 + 18 / 1024)
    assert len(completion.ids) == 3 and completion.stop_reason is StopReason.LENGTH
    assert (completion.prompt_tokens, completion.cached_tokens) == (16, 0)


def test_a_second_turn_prefills_only_what_is_new():
    async def main():
        engine = SimulatedEngine(COST)
        await engine.open("a")
        first = await engine.sample("a", range(100), params(4))
        second = await engine.sample("a", (*range(100), *first.ids, 7, 8, 9), params(4))
        changed = await engine.sample("a", (*range(50), *range(500, 550)), params(1))
        return second.cached_tokens, changed.cached_tokens, engine.stats()

    second, changed, stats = run_virtual(main())
    assert second == 104
    assert changed == 50
    assert stats.prefill_tokens == 100 + 3 + 50 and stats.repeated_tokens == 0


def test_ids_are_a_function_of_seed_and_position_and_the_logprobs_are_true():
    async def main():
        engine = SimulatedEngine(COST, vocab=50, version=3)
        await engine.open("a")
        await engine.open("b")
        short = await engine.sample("a", [1], params(4, seed=9))
        long = await engine.sample("b", [1, 2], params(8, seed=9))
        scored = await engine.score([1, *short.ids], 1)
        return short, long, scored

    short, long, scored = run_virtual(main())
    assert long.ids[:4] == short.ids
    assert scored == short.logprobs == (-math.log(50),) * 4
    assert set(long.versions) == {3} and all(0 <= i < 50 for i in long.ids)


def test_a_reply_shorter_than_allowed_ends_by_eos():
    async def main():
        engine = SimulatedEngine(COST, reply_tokens=lambda p: p.seed)
        await engine.open("a")
        return [await engine.sample("a", [1], params(5, seed=n)) for n in (3, 5, 6)]

    stops = [(len(c.ids), c.stop_reason) for c in run_virtual(main())]
    assert stops == [(3, StopReason.EOS), (5, StopReason.EOS), (5, StopReason.LENGTH)]


def test_idle_kv_is_taken_from_the_least_recently_used_and_paid_for_again():
    async def main():
        engine = SimulatedEngine(COST)
        history = {}
        for name in "abc":
            await engine.open(name)
            prompt = tuple(range(1300))
            history[name] = prompt + (await engine.sample(name, prompt, params(1))).ids
        assert engine.kv_used == 3 * 1301
        await engine.open("d")
        await engine.sample("d", range(400), params(1))  # 194 tokens free, 401 wanted: 207 of `a`
        after = engine.stats()
        again = await engine.sample("a", (*history["a"], 5), params(1))
        return after, again, engine.stats(), engine.kv_used, held(engine)

    after, again, stats, used, counted = run_virtual(main())
    assert (after.evictions, after.evicted_tokens) == (1, 3 * 1301 + 401 - 4096)
    assert again.cached_tokens == 1301 - after.evicted_tokens
    assert stats.repeated_tokens == after.evicted_tokens
    assert used == counted <= 4096


def test_a_turn_without_room_waits_and_says_for_what():
    async def main():
        engine = SimulatedEngine(COST)
        await engine.open("a")
        await engine.open("b")
        first = asyncio.ensure_future(engine.sample("a", range(3000), params(50)))
        await asyncio.sleep(1)
        second = asyncio.ensure_future(engine.sample("b", range(1500), params(50)))
        await asyncio.sleep(250)
        busy = await engine.load()
        await first
        await engine.release("a")
        await second
        return busy, await engine.load()

    busy, after = run_virtual(main())
    assert (busy.running, busy.waiting, busy.waiting_for_kv) == (1, 1, 1)
    assert (after.running, after.waiting, after.waiting_for_kv) == (0, 0, 0)


def test_sessions_of_a_group_share_the_first_prompt_once():
    async def main():
        engine = SimulatedEngine(COST)
        prompt, cached = tuple(range(1000)), []
        for index in range(3):
            await engine.open(f"s{index}", group="g")
            cached.append((await engine.sample(f"s{index}", prompt, params(2))).cached_tokens)
        # All but the last token, which must be computed to give the next one.
        together = engine.kv_used
        for index in range(3):
            await engine.release(f"s{index}")
        return cached, together, engine.kv_used, len(engine._groups)

    assert run_virtual(main()) == ([0, 999, 999], 1000 + 2 + 3 + 3, 0, 0)


@pytest.mark.parametrize("way", ["deadline", "release", "cancel"])
def test_a_turn_that_ends_early_frees_its_row_and_keeps_its_tokens(way):
    async def main():
        engine = SimulatedEngine(COST)
        await engine.open("a")
        limit = 10.0 if way == "deadline" else 1e6
        turn = asyncio.ensure_future(engine.sample("a", range(16), params(50, deadline_s=limit)))
        await asyncio.sleep(10.0)
        if way == "release":
            await engine.release("a")
        if way == "cancel":
            turn.cancel()
        outcome = (await asyncio.gather(turn, return_exceptions=True))[0]
        await engine.release("a")
        load = await engine.load()
        return outcome, load.running, load.sessions, engine.kv_used

    outcome, *rest = run_virtual(main())
    assert rest == [0, 0, 0]
    if way == "cancel":
        assert isinstance(outcome, asyncio.CancelledError)
    else:
        assert outcome.stop_reason is StopReason.ABORTED
        assert len(outcome.ids) == 7  # (10 s - 2 s) / 1.27 s a step, and the prefill's own


def test_faults_are_what_they_say():
    async def main():
        engine = SimulatedEngine(COST)
        await engine.open("a")

        async def timed():
            began = now()
            await engine.sample("a", [1], params(10))
            return now() - began

        healthy = await timed()
        engine.slow(4.0)
        poisoned = await timed()
        engine.slow(1.0)
        turn = asyncio.ensure_future(engine.sample("a", [1], params(10)))
        await asyncio.sleep(2)
        engine.freeze()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(100):
                await engine.load()
        assert not turn.done()
        engine.revive()
        assert len((await turn).ids) == 10
        dying = asyncio.ensure_future(engine.sample("a", [1], params(10)))
        await asyncio.sleep(1)
        engine.kill()
        with pytest.raises(SamplerError, match="killed"):
            await dying
        with pytest.raises(SamplerError, match="killed"):
            await engine.load()
        await engine.release("a")
        engine.revive()
        with pytest.raises(SamplerError, match="not open"):
            await engine.sample("a", [1], params(1))
        return healthy, poisoned

    healthy, poisoned = run_virtual(main())
    assert poisoned == pytest.approx(4 * healthy, rel=1e-9)


def test_bad_calls_are_refused_with_their_numbers():
    async def main():
        engine = SimulatedEngine(COST, max_context=64)
        await engine.open("a")
        with pytest.raises(SamplerError, match="already open"):
            await engine.open("a")
        with pytest.raises(SamplerError, match="prompt of 64 tokens"):
            await engine.sample("a", range(64), params(1))
        with pytest.raises(SamplerError, match="prompt of 0 tokens"):
            await engine.sample("a", [], params(1))
        with pytest.raises(ConfigError, match="start"):
            await engine.score([1, 2], 0)
        cut = await engine.sample("a", range(60), params(50))
        assert len(cut.ids) == 4

    run_virtual(main())


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000))
def test_memory_adds_up_and_every_turn_is_answered_on_random_traffic(seed):
    """Histories that outgrow the KV, cancels, groups; checked as it goes."""
    rng = random.Random(seed)
    answered = []

    async def client(engine, name):
        await asyncio.sleep(rng.random() * 20)
        await engine.open(name, group=rng.choice(["", "g", "h"]))
        ids = tuple(range(rng.randrange(1, 600)))
        for _ in range(rng.randrange(1, 6)):
            if len(ids) > 3000:
                break
            call = engine.sample(name, ids, params(rng.randrange(1, 200), seed=rng.randrange(99)))
            try:
                async with asyncio.timeout(rng.choice([50, 1e5])):
                    completion = await call
            except TimeoutError:
                completion = None
            assert engine.kv_used == held(engine) <= COST.kv_tokens
            answered.append(name)
            if completion is not None:
                ids += completion.ids
            ids += tuple(range(rng.randrange(300)))
            await asyncio.sleep(rng.random() * 30)
        await engine.release(name)

    async def main():
        engine = SimulatedEngine(COST, max_rows=rng.choice([2, 8]), chunk_tokens=256)
        await asyncio.gather(*(client(engine, str(i)) for i in range(8)))
        load = await engine.load()
        assert (load.running, load.waiting, load.sessions, engine.kv_used) == (0, 0, 0, 0)
        assert not engine._idle and engine._idle_own == 0 and not engine._groups
        return now()

    first = run_virtual(main())
    assert len(answered) >= 8
    rng, answered = random.Random(seed), []
    assert run_virtual(main()) == first, "the same program takes the same time"


def test_arrivals_in_the_middle_of_a_leap_cost_what_single_steps_cost():
    """An invariance: looking at the engine all the time changes nothing."""

    async def main(looks):
        engine = SimulatedEngine(COST)

        async def one(name, after):
            await asyncio.sleep(after)
            await engine.open(name)
            await engine.sample(name, range(20), params(30))
            return now()

        async def look():
            for _ in range(looks):
                await asyncio.sleep(0.37)
                engine.stats()

        ends = await asyncio.gather(one("a", 0), one("b", 5.1), one("c", 11.7), look())
        return ends[:3], engine.stats().decoded_tokens

    quiet, watched = run_virtual(main(0)), run_virtual(main(300))
    assert quiet[0] == pytest.approx(watched[0], abs=1e-6)
    assert quiet[1] == watched[1] == 90


def test_costs_are_recovered_from_measured_steps():
    rng = random.Random(0)
    true = QWEN3_8B_H100
    samples = []
    for _ in range(200):
        rows = rng.randrange(1, 200)
        context = rows * rng.randrange(100, 20_000)
        samples.append((rows, context, true.decode_s(rows, context) * rng.uniform(0.98, 1.02)))
    step_s, row_s, context_s = fit_decode(samples)
    assert step_s == pytest.approx(true.step_s, rel=0.3)
    assert row_s == pytest.approx(true.row_s, rel=0.3)
    assert context_s == pytest.approx(true.context_s, rel=0.02)
    # What a coefficient below 0 would explain is left to the others.
    assert fit_decode([(1, 10, 1.0), (2, 20, 0.9), (3, 30, 0.8), (4, 40, 0.7)])[1:] == (0.0, 0.0)
    with pytest.raises(ConfigError, match="3 measured steps"):
        fit_decode(samples[:2])


def test_the_default_costs_are_the_data_sheets():
    """Worked by hand from the shape of the model and the numbers of the accelerator."""
    assert QWEN3_8B_H100.step_s == pytest.approx(16.38e9 / (0.75 * 3.35e12))
    assert 1 / QWEN3_8B_H100.prefill_s == pytest.approx(0.45 * 989e12 / 16.38e9)
    assert QWEN3_8B_H100.kv_tokens == int((72e9 - 16.38e9 - 4e9) / 147_456)


def test_it_is_a_replica():
    assert isinstance(SimulatedEngine(), Replica)
