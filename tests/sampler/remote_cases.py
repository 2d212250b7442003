"""What both remote samplers must do, told once."""

import asyncio
import json
import time

import pytest

from treadle.errors import ConfigError, SamplerError, WeightsError
from treadle.testing import fake_logprobs
from treadle.types import SamplingParams, StopReason

PROMPT = (3, 4, 5)


def weights(folder, shift, adapter=False):
    folder.mkdir(parents=True)
    name = "adapter_config.json" if adapter else "config.json"
    (folder / name).write_text(json.dumps({"shift": shift}))
    return folder


def want(prompt, ids, shifts, temperature=1.0):
    """Logprobs of the fake model along a turn whose token t was drawn with shifts[t]."""
    path = [prompt[-1], *ids]
    return [
        fake_logprobs(a, shift, temperature)[b]
        for a, b, shift in zip(path, path[1:], shifts, strict=False)
    ]


async def turn(sampler, session="s", prompt=PROMPT, new=6, opened=False, **params):
    if not opened:
        await sampler.open(session)
    return await sampler.sample(session, prompt, SamplingParams(max_new_tokens=new, **params))


async def until(condition, limit_s=5.0):
    """Poll what another thread changes."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        await asyncio.sleep(0.01)


def gives_ids_logprobs_and_versions(make_fake, make_sampler):
    async def main():
        with make_fake() as fake, make_sampler(fake, version=4) as sampler:
            done = await turn(sampler, seed=7, temperature=0.5, new=12)
            again = await turn(sampler, "t", seed=7, temperature=0.5, new=12)
            return done, again

    done, again = asyncio.run(main())
    assert done == again
    assert len(done.ids) == 12 and done.versions == (4,) * 12
    assert done.logprobs == pytest.approx(want(PROMPT, done.ids, [0] * 12, 0.5), abs=1e-9)
    assert done.stop_reason is StopReason.LENGTH and done.prompt_tokens == 3


def greedy_logprobs_are_those_at_temperature_1(make_fake, make_sampler):
    async def main():
        with make_fake() as fake, make_sampler(fake) as sampler:
            return await turn(sampler, temperature=0.0)

    done = asyncio.run(main())
    assert done.logprobs == pytest.approx(want(PROMPT, done.ids, [0] * 6), abs=1e-9)


def the_context_ends_a_turn_and_refuses_a_prompt_without_room(make_fake, make_sampler):
    async def main():
        with make_fake() as fake, make_sampler(fake) as sampler:
            done = await turn(sampler, prompt=(3,) * 60, new=50)
            with pytest.raises(SamplerError, match="prompt of 64 tokens leaves no room"):
                await turn(sampler, "t", prompt=(3,) * 64)
            return done

    done = asyncio.run(main())
    assert len(done.ids) == 4 and done.stop_reason is StopReason.LENGTH


def a_stop_id_is_kept_and_ends_the_turn(make_fake, make_sampler):
    async def main():
        with make_fake() as fake, make_sampler(fake, stop_ids=range(0, 32, 2)) as sampler:
            return await turn(sampler, prompt=(3,), new=60, seed=1)

    done = asyncio.run(main())
    assert done.stop_reason is StopReason.EOS
    assert done.ids[-1] % 2 == 0 and all(i % 2 for i in done.ids[:-1])


def scores_are_teacher_forced(make_fake, make_sampler):
    ids = (5, 6, 7, 8, 9)

    async def main():
        with make_fake() as fake, make_sampler(fake) as sampler:
            with pytest.raises(SamplerError, match="temperature 1 only"):
                await sampler.score(ids, 1, temperature=0.5)
            with pytest.raises(ConfigError, match="`start`"):
                await sampler.score(ids, 0)
            return await sampler.score(ids, 2)

    assert asyncio.run(main()) == pytest.approx(want((6,), ids[2:], [0] * 3), abs=1e-9)


def sessions_are_opened_once_and_released_at_any_time(make_fake, make_sampler):
    async def main():
        with make_fake(delay_s=0.02) as fake, make_sampler(fake) as sampler:
            with pytest.raises(SamplerError, match="not open"):
                await turn(sampler, opened=True)
            running = asyncio.ensure_future(turn(sampler, new=50))
            await until(lambda: fake.running == 1)
            with pytest.raises(SamplerError, match="already open"):
                await sampler.open("s")
            with pytest.raises(SamplerError, match="middle of a turn"):
                await turn(sampler, opened=True)
            await sampler.release("s")
            await sampler.release("s")
            ended = await running
            await until(lambda: fake.running == 0)
            load = await sampler.load()
            await turn(sampler, new=1)
            return ended, load, fake.aborted

    ended, load, aborted = asyncio.run(main())
    assert ended.stop_reason is StopReason.ABORTED and ended.ids == ()
    assert load.sessions == 0 and load.running == 0 and aborted == 1


def a_cancelled_caller_aborts_its_turn_alone(make_fake, make_sampler):
    """B177: the server stops decoding for a client that left, and for no other."""

    async def main():
        with make_fake(delay_s=0.02) as fake, make_sampler(fake) as sampler:
            turns = [asyncio.ensure_future(turn(sampler, f"s{i}", new=20)) for i in range(10)]
            await until(lambda: fake.running == 10)
            for each in turns[:5]:
                each.cancel()
            await until(lambda: fake.running <= 5)
            done = await asyncio.gather(*turns, return_exceptions=True)
            later = await turn(sampler, "s0", opened=True, new=2)
            return done, later, fake.aborted, fake.running

    done, later, aborted, running = asyncio.run(main())
    assert all(isinstance(d, asyncio.CancelledError) for d in done[:5])
    assert all(len(d.ids) == 20 for d in done[5:])
    assert aborted == 5 and running == 0 and len(later.ids) == 2


def a_turn_past_its_deadline_is_aborted(make_fake, make_sampler):
    async def main():
        with make_fake(delay_s=0.05) as fake, make_sampler(fake) as sampler:
            done = await turn(sampler, new=60, deadline_s=0.2)
            await until(lambda: fake.running == 0)
            return done

    done = asyncio.run(main())
    assert done.stop_reason is StopReason.ABORTED and done.ids == () and done.prompt_tokens == 3


def a_server_that_dies_in_a_turn_is_a_typed_error(make_fake, make_sampler):
    async def main():
        with make_fake(delay_s=0.02) as fake, make_sampler(fake) as sampler:
            turns = [asyncio.ensure_future(turn(sampler, f"s{i}", new=50)) for i in range(3)]
            await until(lambda: fake.running == 3)
            await asyncio.to_thread(fake.stop)
            done = await asyncio.gather(*turns, return_exceptions=True)
            with pytest.raises(SamplerError, match=r"failed: .*\nhint: is the server running"):
                await sampler.load()
            with pytest.raises(SamplerError, match="failed"):
                await turn(sampler, "s0", opened=True)
            return done

    done = asyncio.run(main())
    assert [type(d) for d in done] == [SamplerError] * 3


def closing_ends_every_call(make_fake, make_sampler):
    async def main():
        with make_fake(delay_s=0.02) as fake:
            sampler = make_sampler(fake).start()
            running = asyncio.ensure_future(turn(sampler, new=50))
            await until(lambda: fake.running == 1)
            await asyncio.to_thread(sampler.close)
            with pytest.raises(SamplerError, match="was closed"):
                await running
            with pytest.raises(SamplerError, match="was closed"):
                await sampler.load()
            await sampler.release("s")
            sampler.close()

    asyncio.run(main())


def every_event_loop_may_call(make_fake, make_sampler):
    with make_fake() as fake, make_sampler(fake) as sampler:
        first = asyncio.run(turn(sampler, seed=1))
        second = asyncio.run(turn(sampler, opened=True, seed=1))
    assert first == second


def a_wrong_key_is_refused_and_a_right_one_is_in_no_message(make_fake, make_sampler):
    with make_fake(key="sesame") as fake:
        with pytest.raises(SamplerError, match="pass key="):
            make_sampler(fake, key="wrong-key").start()
        with make_sampler(fake, key="sesame") as sampler:
            fake.refuse["/metrics"] = (500, "broken")
            with pytest.raises(SamplerError, match="answered 500: 'broken'") as error:
                asyncio.run(sampler.load())
            shown = repr(vars(sampler)) + repr(vars(sampler._io) | {"_headers": 0}) + str(error)
    assert "sesame" not in shown


def an_adapter_serves_new_turns_while_old_ones_end(make_fake, make_sampler, folder):
    async def main():
        with make_fake(delay_s=0.02) as fake, make_sampler(fake) as sampler:
            old = asyncio.ensure_future(turn(sampler, "old", new=20))
            await until(lambda: fake.running == 1)
            await sampler.adopt(1, weights(folder / "a", 5, adapter=True))
            assert sampler.version == 1
            new = await turn(sampler, "new")
            scores = await sampler.score((*PROMPT, *new.ids), len(PROMPT))
            return await old, new, scores, fake.aborted

    old, new, scores, aborted = asyncio.run(main())
    assert old.versions == (0,) * 20 and aborted == 0
    assert old.logprobs == pytest.approx(want(PROMPT, old.ids, [0] * 20), abs=1e-9)
    assert new.versions == (1,) * 6
    assert new.logprobs == pytest.approx(want(PROMPT, new.ids, [5] * 6), abs=1e-9)
    assert scores == pytest.approx(new.logprobs, abs=1e-9)


def a_hundred_adapters_never_fill_the_server(make_fake, make_sampler, folder):
    """B060: each version is unloaded when nothing draws from it."""

    async def main():
        with make_fake() as fake, make_sampler(fake) as sampler:
            for version in range(1, 101):
                await sampler.adopt(version, weights(folder / str(version), version, adapter=True))
                done = await turn(sampler, f"s{version}", new=2)
                assert done.versions == (version,) * 2
            await until(lambda: len(fake.adapters) == 1)
            return fake.most_adapters

    assert asyncio.run(main()) <= 4


def full_weights_change_under_running_turns(make_fake, make_sampler, folder):
    """B071: nothing is aborted, and each token has the version that drew it."""

    async def main():
        with make_fake(delay_s=0.02) as fake, make_sampler(fake) as sampler:
            turns = [asyncio.ensure_future(turn(sampler, f"s{i}", new=40)) for i in range(8)]
            await until(lambda: fake.running == 8)
            await asyncio.sleep(0.2)
            await sampler.adopt(3, weights(folder / "w", 2))
            later = await turn(sampler, "later")
            return await asyncio.gather(*turns), later, fake.aborted

    done, later, aborted = asyncio.run(main())
    assert aborted == 0 and later.versions == (3,) * 6
    for each in done:
        assert len(each.ids) == 40 and sorted(set(each.versions)) == [0, 3]
        assert each.versions == tuple(sorted(each.versions))
        shifts = [2 if v == 3 else 0 for v in each.versions]
        assert each.logprobs == pytest.approx(want(PROMPT, each.ids, shifts), abs=1e-9)


def weights_that_cannot_be_loaded_leave_the_old_ones(make_fake, make_sampler, folder):
    empty = folder / "empty"
    empty.mkdir()
    half = folder / "half"
    half.mkdir()
    (half / "adapter_config.json").write_text("{}")

    async def main():
        with make_fake() as fake, make_sampler(fake) as sampler:
            with pytest.raises(WeightsError, match="0 serves again"):
                await sampler.adopt(1, empty)
            with pytest.raises(WeightsError, match="0 still serves"):
                await sampler.adopt(1, half)
            with pytest.raises(WeightsError, match="no directory on this machine"):
                await sampler.adopt(1, folder / "absent")
            done = await turn(sampler)
            await sampler.adopt(2, weights(folder / "w", 2))
            with pytest.raises(WeightsError, match="versions only grow"):
                await sampler.adopt(2, folder / "w")
            after = await turn(sampler, "after")
            return done, after

    done, after = asyncio.run(main())
    assert done.versions == (0,) * 6 and after.versions == (2,) * 6


def a_server_that_may_be_half_updated_serves_no_more(make_fake, make_sampler, folder, reload):
    async def main():
        with make_fake() as fake, make_sampler(fake) as sampler:
            fake.refuse[reload] = (500, "out of memory")
            with pytest.raises(WeightsError, match="serves no more"):
                await sampler.adopt(1, weights(folder / "w", 2))
            del fake.refuse[reload]
            for call in (sampler.open("s"), sampler.load(), sampler.score((1, 2), 1)):
                with pytest.raises(SamplerError, match="nobody knows what it holds"):
                    await call

    asyncio.run(main())


CASES = [
    gives_ids_logprobs_and_versions,
    greedy_logprobs_are_those_at_temperature_1,
    the_context_ends_a_turn_and_refuses_a_prompt_without_room,
    a_stop_id_is_kept_and_ends_the_turn,
    scores_are_teacher_forced,
    sessions_are_opened_once_and_released_at_any_time,
    a_cancelled_caller_aborts_its_turn_alone,
    a_turn_past_its_deadline_is_aborted,
    a_server_that_dies_in_a_turn_is_a_typed_error,
    closing_ends_every_call,
    every_event_loop_may_call,
    a_wrong_key_is_refused_and_a_right_one_is_in_no_message,
]
FOLDER_CASES = [
    an_adapter_serves_new_turns_while_old_ones_end,
    a_hundred_adapters_never_fill_the_server,
    full_weights_change_under_running_turns,
    weights_that_cannot_be_loaded_leave_the_old_ones,
]
