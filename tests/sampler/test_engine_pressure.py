"""KV pressure, long prompts, pauses and abandoned sessions, on a real model."""

import asyncio
import gc
import tracemalloc

import pytest

from tests.sampler.conftest import perturb, prompts, reference_logprobs, run_turns, turn
from treadle.errors import ConfigError, SamplerError
from treadle.sampler.engine import Engine
from treadle.types import Replica, StopReason


async def until(condition):
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


def check(library, prompt, completion):
    want = reference_logprobs(library, prompt, completion)
    assert completion.logprobs == pytest.approx(want, abs=1e-4)


def test_preempted_turns_lose_no_token_and_draw_what_they_draw_alone(policy, library):
    given = prompts(6, 20)
    turns = [{"prompt": p, "new": 60, "seed": i} for i, p in enumerate(given)]
    alone = [run_turns(policy, [each])[0] for each in turns]

    async def main():
        with Engine(policy, kv_tokens=224) as engine:
            done = await asyncio.gather(
                *(turn(engine, f"s{i}", **each) for i, each in enumerate(turns))
            )
            return done, engine.stats()

    done, stats = asyncio.run(main())
    assert stats.preemptions >= 1 and stats.decoded_tokens == 6 * 60
    for prompt, got, want in zip(given, done, alone, strict=True):
        assert got.ids == want.ids and got.versions == (0,) * 60
        check(library, prompt, got)


def test_a_long_prompt_does_not_stall_running_turns(policy, library):
    """Every step of the long prompt gives the running turn a token too."""
    short, long = prompts(1, 10)[0], prompts(1, 200, seed=1)[0]

    async def main():
        with Engine(policy, prefill_tokens=16) as engine:
            task = asyncio.create_task(turn(engine, "short", short, new=100))
            await until(lambda: engine.stats().decoded_tokens > 3)
            before = engine.stats()
            first = await turn(engine, "long", long, new=1)
            after = engine.stats()
            done = await task
            pieces = after.steps - after.decode_steps - (before.steps - before.decode_steps)
            return first, done, pieces, after.decoded_tokens - before.decoded_tokens

    first, done, pieces, drawn = asyncio.run(main())
    assert pieces >= 12 and drawn >= 12
    check(library, long, first)
    check(library, short, done)


def test_prompts_of_other_groups_and_later_turns_share_what_begins_alike(policy, library):
    system = prompts(1, 50)[0]
    given = [[*system, *p] for p in prompts(3, 9, seed=1)]

    async def main():
        with Engine(policy) as engine:
            done = []
            for i, prompt in enumerate(given):
                done.append(await turn(engine, f"s{i}", prompt, group=f"g{i}"))
                await engine.release(f"s{i}")
            return done

    done = asyncio.run(main())
    assert [d.cached_tokens for d in done] == [0, 50, 50]
    for prompt, each in zip(given, done, strict=True):
        check(library, prompt, each)


def test_an_eight_turn_tool_loop_reuses_nine_tenths_of_its_prompts(policy):
    async def loop(engine, i):
        session, prompt = f"s{i}", prompts(1, 60, seed=i)[0]
        await engine.open(session)
        for k in range(8):
            done = await turn(engine, session, prompt, new=8, opened=True, seed=i)
            prompt = [*prompt, *done.ids, *prompts(1, 6, seed=100 * i + k)[0]]
        await engine.release(session)

    async def main():
        with Engine(policy, max_rows=4, kv_tokens=2048) as engine:
            await asyncio.gather(*(loop(engine, i) for i in range(8)))
            return await engine.load()

    load = asyncio.run(main())
    # The first prompt of each session is new: 60 of its 8 prompts' tokens.
    again = load.prefix_query_tokens - 8 * 60
    assert load.prefix_hit_tokens / again >= 0.9
    assert load.sessions == load.running == load.waiting == 0 and load.kv_usage == 0.0


def test_recompute_on_publish_draws_what_the_new_weights_say(policy):
    (prompt,) = prompts(1)

    async def main(on_publish):
        with Engine(policy, on_publish=on_publish) as engine:
            task = asyncio.create_task(turn(engine, "s", prompt, new=200, seed=5))
            await until(lambda: engine.stats().decoded_tokens > 5)
            await engine.pause()
            perturb(policy, seed=engine.version + 1)
            await asyncio.to_thread(engine.publish, 1)
            await engine.resume()
            done = await task
            scores = await engine.score([*prompt, *done.ids], len(prompt))
            cut = done.versions.index(1)
            assert list(done.versions) == [0] * cut + [1] * (200 - cut)
            assert engine.stats().preemptions == 0
            return max(abs(a - b) for a, b in zip(done.logprobs[cut:], scores[cut:], strict=True))

    assert asyncio.run(main("recompute")) < 1e-4
    assert asyncio.run(main("keep")) > 1e-3, "old keys are still attended to"


def test_a_prompt_is_computed_under_one_version(policy):
    (prompt,) = prompts(1, 200)

    async def main():
        with Engine(policy, prefill_tokens=8) as engine:
            task = asyncio.create_task(turn(engine, "s", prompt, new=4))
            await until(lambda: engine.stats().prefill_tokens > 30)
            perturb(policy)
            await asyncio.to_thread(engine.publish, 1)
            done = await task
            scores = await engine.score([*prompt, *done.ids], len(prompt))
            return done, scores

    done, scores = asyncio.run(main())
    assert done.versions == (1,) * 4
    assert done.logprobs == pytest.approx(scores, abs=1e-4)


def test_a_paused_engine_stands_still_and_goes_on_where_it_was(policy):
    (prompt,) = prompts(1)
    (want,) = run_turns(policy, [{"prompt": prompt, "new": 100}])

    async def main():
        with Engine(policy) as engine:
            task = asyncio.create_task(turn(engine, "s", prompt, new=100))
            await until(lambda: engine.stats().decoded_tokens > 5)
            await engine.pause()
            before = engine.stats().decoded_tokens
            late = await turn(engine, "late", prompt, deadline_s=0.2)
            assert late.stop_reason is StopReason.ABORTED and late.ids == ()
            assert engine.stats().decoded_tokens == before
            await engine.resume()
            return await task

    assert asyncio.run(main()).ids == want.ids


def test_offload_frees_the_kv_and_loses_no_token(policy):
    (prompt,) = prompts(1)
    (want,) = run_turns(policy, [{"prompt": prompt, "new": 100}])

    async def main():
        with Engine(policy) as engine:
            if not engine.capabilities.offload:
                with pytest.raises(SamplerError, match="not supported"):
                    await engine.offload()
                return want
            task = asyncio.create_task(turn(engine, "s", prompt, new=100))
            await until(lambda: engine.stats().decoded_tokens > 5)
            await engine.offload()
            assert engine.stats().kv_usage == 0
            assert not engine._stepper._store.keys.any()
            await engine.resume()
            return await task

    assert asyncio.run(main()).ids == want.ids


# ------------------------------------------------------------------ abandoned sessions


def test_a_thousand_abandoned_sessions_expire_and_leave_nothing(policy):
    """B186: opened and left, some after a turn, some in the middle of one."""
    given = prompts(10, 12)

    async def abandon(engine, i):
        session = f"s{i}"
        await engine.open(session)
        if i % 4 == 1:
            await turn(engine, session, given[i % 10], new=1, opened=True)
        if i % 40 == 2:
            task = asyncio.create_task(turn(engine, session, given[i % 10], new=60, opened=True))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])

    async def wave(engine, first):
        await asyncio.gather(*(abandon(engine, first + i) for i in range(1000)))
        await until(lambda: engine.stats().sessions == 0)

    async def main():
        with Engine(policy, session_ttl_s=0.3, kv_tokens=4096) as engine:
            await wave(engine, 0)
            gc.collect()
            tracemalloc.start()
            try:
                before = tracemalloc.get_traced_memory()[0]
                await wave(engine, 1000)
                engine._stepper._cache.invalidate()
                gc.collect()
                grown = tracemalloc.get_traced_memory()[0] - before
            finally:
                tracemalloc.stop()
            stats = engine.stats()
            assert stats.expired == 2000
            assert (stats.running, stats.waiting, stats.kv_usage) == (0, 0, 0.0)
            assert not engine._sessions and not engine._stepper._used
            assert grown < 500_000, f"{grown} bytes after a thousand sessions"
            with pytest.raises(SamplerError, match=r"unknown session `s7`\s.*left alone"):
                await turn(engine, "s7", [5], opened=True)

    asyncio.run(main())


def test_a_session_in_the_middle_of_a_turn_does_not_expire(policy):
    async def main():
        with Engine(policy, session_ttl_s=0.02) as engine:
            done = await turn(engine, "s", prompts(1)[0], new=200)
            assert done.stop_reason is StopReason.LENGTH and engine.stats().busy_s > 0.02
            await until(lambda: engine.stats().sessions == 0)

    asyncio.run(main())


# ------------------------------------------------------------------ load


def test_the_engine_says_how_busy_it_is(policy):
    async def main():
        engine = Engine(policy, max_rows=2, kv_tokens=160)
        assert isinstance(engine, Replica)
        with pytest.raises(SamplerError, match="not running"):
            await engine.load()
        with engine:
            given = prompts(4, 30)
            tasks = [
                asyncio.create_task(turn(engine, f"s{i}", p, new=90)) for i, p in enumerate(given)
            ]
            await until(lambda: engine.stats().decoded_tokens > 5)
            load = await engine.load()
            assert load.sessions == 4 and load.running + load.waiting == 4
            assert load.kv_tokens == 160 and 0 < load.kv_usage <= 1
            assert 0 <= load.waiting_for_kv <= load.waiting
            await asyncio.gather(*tasks)
            load = await engine.load()
            assert load.preemptions == engine.stats().preemptions >= 1
            metrics = engine.metrics()
            assert metrics["num_preemptions_total"] == load.preemptions
            assert metrics["generation_tokens_total"] == 360
            assert metrics["prefix_cache_queries_total"] == 120
        with pytest.raises(SamplerError, match="closed"):
            await engine.load()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("name", "value"),
    [("prefill_tokens", 0), ("session_ttl_s", 0), ("on_publish", "sometimes")],
)
def test_bad_settings_are_named(policy, name, value):
    with pytest.raises(ConfigError, match=f"`{name}` must be"):
        Engine(policy, **{name: value})
