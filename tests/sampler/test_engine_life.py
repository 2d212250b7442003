"""Stops, cancellation, deadlines, death, and what is left afterwards."""

import asyncio
import random
import threading

import pytest
import torch

from tests.sampler.conftest import perturb, prompts, reference_logprobs, run_turns, turn
from treadle.errors import ConfigError, SamplerError
from treadle.sampler.engine import Engine
from treadle.sampler.engine.stopping import StopRule
from treadle.types import Sampler, SamplingParams, StopReason, WeightSink


def assert_empty(engine):
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.sessions, stats.kv_usage) == (0, 0, 0, 0.0)


async def until(condition):
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


def test_the_engine_is_a_sampler_and_a_weight_sink(policy):
    engine = Engine(policy)
    sampler: Sampler = engine
    sink: WeightSink = engine
    assert isinstance(sampler, Sampler) and sink.publish == engine.publish
    assert engine.capabilities.release and engine.capabilities.score


# ------------------------------------------------------------------ stops


def test_every_stop_id_of_the_model_ends_a_turn(make_policy, policy):
    """B019: any declared stop id finishes, and it is kept with its logprob."""
    (prompt,) = prompts(1)
    (free,) = run_turns(policy, [{"prompt": prompt, "new": 30}])
    for at in (4, 9):
        stop = free.ids[at]
        first = free.ids.index(stop)
        (done,) = run_turns(make_policy(stop_ids=(262, stop)), [{"prompt": prompt, "new": 30}])
        assert done.stop_reason is StopReason.EOS
        assert done.ids == free.ids[: first + 1]
        assert len(done.logprobs) == len(done.versions) == len(done.entropies) == len(done.ids)


def test_a_stop_string_ends_a_turn_and_nothing_is_appended(policy, library):
    """B018: no token without the engine's logprob, whatever ended the turn."""
    (prompt,) = prompts(1)
    (free,) = run_turns(policy, [{"prompt": prompt, "new": 30, "seed": 2}])
    text = policy.loaded.tokenizer.decode(list(free.ids[5:8]))
    turns = [{"prompt": prompt, "new": 30, "seed": 2, "stop": ("never said", text)}]
    (done,) = run_turns(policy, turns)
    assert done.stop_reason is StopReason.STOP_STRING
    assert done.ids == free.ids[: len(done.ids)] and len(done.ids) <= 8
    assert text in policy.loaded.tokenizer.decode(list(done.ids))
    assert text not in policy.loaded.tokenizer.decode(list(done.ids[:-1]))
    want = reference_logprobs(library, prompt, done)
    assert done.logprobs == pytest.approx(want, abs=1e-4)


def test_a_stop_string_may_begin_anywhere_and_end_inside_a_token(policy):
    tokenizer = policy.loaded.tokenizer
    rule = StopRule((), tokenizer)
    word = "caf\N{LATIN SMALL LETTER E WITH ACUTE}"
    drawn = tokenizer.encode("x" * 100 + f"a {word} END", add_special_tokens=False)
    for stop in (word, "END", " E", "x"):
        params = SamplingParams(max_new_tokens=1000, stop=(stop,))
        # The prompt says it too, which is no reason to stop.
        prompt = tokenizer.encode(stop, add_special_tokens=False)
        ends = [
            n
            for n in range(1, len(drawn) + 1)
            if rule.reason(prompt + drawn[:n], len(prompt), params)
        ]
        text = tokenizer.decode(drawn[: ends[0]])
        assert text.endswith(stop), "the first token that completes it ends the turn"


def test_length_and_abort_are_told_apart_from_an_answer(policy):
    (done,) = run_turns(policy, [{"prompt": prompts(1)[0], "new": 3}])
    assert done.stop_reason is StopReason.LENGTH and len(done.ids) == 3


# ------------------------------------------------------------------ deadlines, cancellation


def test_a_deadline_aborts_a_running_turn_with_what_it_has(policy, library):
    (prompt,) = prompts(1)
    turns = [
        {"prompt": prompt, "new": 120, "deadline_s": 0.05},
        {"prompt": prompt, "new": 120, "seed": 1},
    ]
    cut, whole = run_turns(policy, turns)
    assert whole.stop_reason is StopReason.LENGTH and len(whole.ids) == 120
    assert cut.stop_reason is StopReason.ABORTED and len(cut.ids) < 120
    assert len(cut.logprobs) == len(cut.versions) == len(cut.entropies) == len(cut.ids)
    if cut.ids:
        assert cut.logprobs == pytest.approx(reference_logprobs(library, prompt, cut), abs=1e-4)


def test_a_deadline_covers_the_queue(policy):
    given = prompts(2)

    async def main():
        with Engine(policy, max_rows=1) as engine:
            first = asyncio.create_task(turn(engine, "a", given[0], new=120))
            await until(lambda: engine.stats().running == 1)
            late = await turn(engine, "b", given[1], new=5, deadline_s=0.01)
            assert late.stop_reason is StopReason.ABORTED and late.ids == ()
            assert (await first).stop_reason is StopReason.LENGTH
            assert engine.stats().aborted == 1

    asyncio.run(main())


def test_an_aborted_turn_can_be_resumed_with_its_tokens(policy):
    """B072: ids, logprobs and versions agree, and the rest comes out as if never cut."""
    (prompt,) = prompts(1)
    (whole,) = run_turns(policy, [{"prompt": prompt, "new": 120}])

    async def main():
        with Engine(policy) as engine:
            cut = await turn(engine, "s", prompt, new=120, deadline_s=0.05)
            if cut.stop_reason is not StopReason.ABORTED:
                return cut.ids
            rest = await turn(engine, "s", [*prompt, *cut.ids], new=120 - len(cut.ids), opened=True)
            assert rest.stop_reason is StopReason.LENGTH
            return cut.ids + rest.ids

    assert asyncio.run(main()) == whole.ids


def test_a_cancelled_call_frees_its_row_and_its_kv(policy):
    async def main():
        with Engine(policy, max_rows=2) as engine:
            given = prompts(4)
            tasks = [
                asyncio.create_task(turn(engine, f"s{i}", p, new=60)) for i, p in enumerate(given)
            ]
            await until(lambda: engine.stats().running == 2)
            tasks[0].cancel()
            tasks[3].cancel()
            done = await asyncio.gather(*tasks, return_exceptions=True)
            assert isinstance(done[0], asyncio.CancelledError)
            assert isinstance(done[3], asyncio.CancelledError)
            assert [len(d.ids) for d in done[1:3]] == [60, 60]
            assert engine.stats().aborted == 2
            # The session lives on and can be used again.
            assert len((await turn(engine, "s0", given[0], opened=True)).ids) == 8
            for i in range(4):
                await engine.release(f"s{i}")
            assert_empty(engine)

    asyncio.run(main())


def test_after_a_cancelled_turn_its_session_takes_the_next_one_at_once(policy):
    (prompt,) = prompts(1)

    async def main():
        with Engine(policy) as engine:
            await engine.open("s")
            for _ in range(5):
                decoded = engine.stats().decoded_tokens
                task = asyncio.create_task(turn(engine, "s", prompt, opened=True, new=200))
                await until(lambda n=decoded: engine.stats().decoded_tokens > n)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert len((await turn(engine, "s", prompt, opened=True, new=2)).ids) == 2
            assert engine.stats().aborted == 5
            await engine.release("s")
            assert_empty(engine)

    asyncio.run(main())


# ------------------------------------------------------------------ sessions


def test_sessions_are_opened_once_and_released_any_number_of_times(policy):
    async def main():
        with Engine(policy) as engine:
            await engine.open("s")
            with pytest.raises(SamplerError, match="already open"):
                await engine.open("s")
            await engine.release("s")
            await engine.release("s")
            await engine.release("never opened")
            with pytest.raises(SamplerError, match="unknown session `s`"):
                await turn(engine, "s", [5], opened=True)
            await engine.open("s")

    asyncio.run(main())


def test_one_turn_per_session_at_a_time(policy):
    async def main():
        with Engine(policy) as engine:
            first = asyncio.create_task(turn(engine, "s", [5], new=100))
            await until(lambda: engine.stats().running == 1)
            with pytest.raises(SamplerError, match="middle of a turn"):
                await turn(engine, "s", [5], opened=True)
            assert len((await first).ids) == 100

    asyncio.run(main())


def test_releasing_a_session_in_mid_turn_aborts_the_turn(policy):
    async def main():
        with Engine(policy) as engine:
            task = asyncio.create_task(turn(engine, "s", [5], new=200))
            await until(lambda: engine.stats().decoded_tokens > 3)
            await engine.release("s")
            assert_empty(engine)
            done = await task
            assert done.stop_reason is StopReason.ABORTED and 3 < len(done.ids) < 200

    asyncio.run(main())


def test_a_thousand_sessions_leave_nothing_behind(policy):
    """Opened, used, cancelled, cut by a deadline, abandoned unused; a small budget throughout."""
    rng = random.Random(0)
    given = prompts(40, 12)

    async def client(engine, i):
        session, group = f"s{i}", f"g{i // 4}" if i % 3 else ""
        await engine.open(session, group=group)
        kind = i % 5
        try:
            if kind == 0:
                return
            call = turn(
                engine,
                session,
                given[i // 4 % 40],
                new=rng.randint(1, 6),
                opened=True,
                seed=i,
                deadline_s=1e-4 if kind == 1 else 60,
            )
            if kind == 2:
                task = asyncio.create_task(call)
                await asyncio.sleep(rng.random() * 0.05)
                task.cancel()
                await asyncio.wait([task])
            else:
                await call
        finally:
            await engine.release(session)

    async def main():
        with Engine(policy, max_rows=32, kv_tokens=640) as engine:
            await asyncio.gather(*(client(engine, i) for i in range(1000)))
            assert_empty(engine)
            assert engine._stepper._cache.pool.free == 40
            assert not engine._stepper._used and not engine._stepper.scheduler._busy

    asyncio.run(main())


# ------------------------------------------------------------------ refusals


def test_what_cannot_fit_is_refused_at_once_and_others_go_on(policy):
    """B113."""

    async def main():
        with Engine(policy, kv_tokens=128) as engine:
            going = asyncio.create_task(turn(engine, "a", [5] * 10, new=60))
            with pytest.raises(SamplerError, match=r"120 \+ max_new_tokens 20 = 140 .* 128"):
                await turn(engine, "b", [5] * 120, new=20)
            with pytest.raises(SamplerError, match=r"= 300 tokens exceed the context of 256"):
                await turn(engine, "c", [5] * 100, new=200)
            assert len((await going).ids) == 60

    asyncio.run(main())


def test_bad_arguments_are_refused_before_they_reach_the_engine(policy):
    async def main():
        with Engine(policy) as engine:
            with pytest.raises(ConfigError, match="temperature"):
                await turn(engine, "a", [5], temperature=float("nan"))
            with pytest.raises(SamplerError, match="id 263 at position 1"):
                await turn(engine, "b", [5, 263])
            with pytest.raises(SamplerError, match="empty"):
                await turn(engine, "c", [])
            for ids, start, temperature in (([5, 6], 0, 1.0), ([5, 6], 3, 1.0), ([5, 6], 1, 0.0)):
                with pytest.raises(ConfigError):
                    await engine.score(ids, start, temperature=temperature)
            with pytest.raises(SamplerError, match="257 ids"):
                await engine.score([5] * 257, 1)
            assert len((await turn(engine, "d", [5])).ids) == 8
            assert await engine.score([5], 1) == ()

    asyncio.run(main())


def test_bad_sizes_are_refused(policy):
    with pytest.raises(ConfigError, match="max_rows"):
        Engine(policy, max_rows=0)
    with pytest.raises(ConfigError, match="kv_tokens"):
        Engine(policy, kv_tokens=15)


# ------------------------------------------------------------------ death


def test_a_crash_in_the_thread_fails_every_request_with_its_cause(policy):
    def explode(module, args):
        if armed.is_set():
            raise RuntimeError("no more memory")

    armed = threading.Event()
    handle = policy.module.get_decoder().register_forward_pre_hook(explode)

    async def main():
        with Engine(policy, max_rows=1, name="e7") as engine:
            tasks = [asyncio.create_task(turn(engine, f"s{i}", [5], new=200)) for i in range(3)]
            await until(lambda: engine.stats().decoded_tokens > 3)
            armed.set()
            done = await asyncio.gather(*tasks, return_exceptions=True)
            for error in done:
                assert isinstance(error, SamplerError)
                assert "e7 died: RuntimeError: no more memory" in str(error)
                assert isinstance(error.__cause__, RuntimeError)
            with pytest.raises(SamplerError, match="no more memory"):
                await engine.open("late")
            with pytest.raises(SamplerError, match="no more memory"):
                engine.publish(1)
            await engine.release("s0")
            assert_empty(engine)

    try:
        asyncio.run(main())
    finally:
        handle.remove()


def test_closing_a_busy_engine_fails_those_who_wait(policy):
    async def main():
        engine = Engine(policy, max_rows=1).start()
        tasks = [asyncio.create_task(turn(engine, f"s{i}", [5], new=200)) for i in range(3)]
        await until(lambda: engine.stats().running == 1)
        await asyncio.to_thread(engine.close)
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(error, SamplerError) and "closed" in str(error)
        engine.close()
        await engine.release("s0")
        with pytest.raises(SamplerError, match="closed"):
            await engine.sample("s0", [5], SamplingParams(max_new_tokens=1))
        with pytest.raises(SamplerError, match="started before"):
            engine.start()
        assert_empty(engine)

    asyncio.run(main())


def test_an_engine_that_was_not_started_says_so(policy):
    with pytest.raises(SamplerError, match="not running"):
        asyncio.run(Engine(policy).open("s"))


def test_async_with_starts_and_closes(policy):
    async def main():
        async with Engine(policy, name="here") as engine:
            assert len((await turn(engine, "s", [5])).ids) == 8
        assert all(thread.name != "here" for thread in threading.enumerate())

    asyncio.run(main())


def test_calls_may_come_from_several_event_loops(policy):
    (prompt,) = prompts(1)
    (want,) = run_turns(policy, [{"prompt": prompt}])
    got = {}

    with Engine(policy) as engine:

        def loop(i):
            got[i] = asyncio.run(turn(engine, f"s{i}", prompt))

        threads = [threading.Thread(target=loop, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert [got[i].ids for i in range(4)] == [want.ids] * 4


def test_a_row_that_is_not_finite_fails_and_poisons_nobody(policy):
    """NaN that stayed in a freed block would reach its next owner through 0 x NaN."""
    good = [5, 6, 7] * 8
    (want,) = run_turns(policy, [{"prompt": good, "new": 100}])
    poison = next(i for i in range(10, 200) if i not in want.ids)
    bad = [5, 6, poison] * 8

    def inject(module, args, output):
        return output.masked_fill((args[0] == poison)[..., None], torch.nan)

    handle = policy.module.get_input_embeddings().register_forward_hook(inject)

    async def main():
        with Engine(policy, kv_tokens=128, max_rows=2) as engine:
            for i in range(3):
                first, second = await asyncio.gather(
                    turn(engine, f"good{i}", good, new=20),
                    turn(engine, f"bad{i}", bad, new=20, group="g"),
                    return_exceptions=True,
                )
                assert isinstance(second, SamplerError) and "not finite" in str(second)
                assert first.ids == want.ids[:20]
                for name in (f"good{i}", f"bad{i}"):
                    await engine.release(name)
            # Long enough to own every block, and to own each half filled for a while.
            return await turn(engine, "last", good, new=100)

    try:
        last = asyncio.run(main())
    finally:
        handle.remove()
    assert last.ids == want.ids
    assert last.logprobs == pytest.approx(want.logprobs, abs=1e-5)


def test_bf16_agrees_with_its_own_scores(make_policy):
    """Parity on the torch or native path, whichever this machine takes: mean <= 0.02."""
    policy = make_policy(dtype=torch.bfloat16)
    perturb(policy)
    given = prompts(8, 30)

    async def main():
        with Engine(policy) as engine:
            done = await asyncio.gather(
                *(turn(engine, f"s{i}", p, new=40, seed=i) for i, p in enumerate(given))
            )
            scores = [
                await engine.score([*p, *d.ids], len(p)) for p, d in zip(given, done, strict=True)
            ]
            return done, scores

    done, scores = asyncio.run(main())
    diffs = [
        abs(a - b) for d, s in zip(done, scores, strict=True)
        for a, b in zip(d.logprobs, s, strict=True)
    ]  # fmt: skip
    assert sum(diffs) / len(diffs) <= 0.02


# ------------------------------------------------------------------ one request's own fault


@pytest.mark.parametrize("bad", [{"stop": ("\ud800",)}, {"top_k": 2**63}])
def test_a_parameter_that_no_batch_could_hold_is_refused_alone(policy, bad):
    given = prompts(2)

    async def main():
        with Engine(policy) as engine:
            other = asyncio.create_task(turn(engine, "other", given[0], new=60))
            await until(lambda: engine.stats().running == 1)
            with pytest.raises(ConfigError, match=f"`{next(iter(bad))}` must be"):
                await turn(engine, "bad", given[1], **bad)
            assert len((await other).ids) == 60

    asyncio.run(main())


def test_a_tokenizer_that_cannot_decode_fails_the_turn_that_needs_it_and_no_other(policy):
    given = prompts(2)

    class Mute:
        def decode(self, ids, skip_special_tokens):
            raise UnicodeError("no such character")

    async def main():
        with Engine(policy) as engine:
            engine._stepper._stop_rule = StopRule((), Mute())
            other = asyncio.create_task(turn(engine, "other", given[0], new=60))
            await until(lambda: engine.stats().running == 1)
            with pytest.raises(SamplerError, match="session `bad`: UnicodeError: no such"):
                await turn(engine, "bad", given[1], stop=("x",))
            assert len((await other).ids) == 60
            assert len((await turn(engine, "bad", given[1], opened=True)).ids) == 8

    asyncio.run(main())


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": 1e-38},
        {"temperature": -1.0},
        {"stop": None},
        {"stop": ("",)},
        {"deadline_s": 10**400},
    ],
)
def test_a_parameter_out_of_range_is_named_and_costs_nobody_anything(policy, bad):
    (prompt,) = prompts(1, 40)

    async def main():
        with Engine(policy) as engine:
            await turn(engine, "other", prompt, new=2)
            with pytest.raises(ConfigError, match=f"`{next(iter(bad))}` must be"):
                await turn(engine, "bad", [5], **bad)
            done = await turn(engine, "other", [*prompt, 5], opened=True, new=2)
            assert done.cached_tokens == 40

    asyncio.run(main())


def test_the_lowest_temperature_draws_what_greedy_does(policy):
    (prompt,) = prompts(1)
    cold, greedy = run_turns(
        policy, [{"prompt": prompt, "temperature": t, "seed": 3} for t in (1e-6, 0.0)]
    )
    assert cold.ids == greedy.ids


@pytest.mark.parametrize(
    ("ids", "message"),
    [([5, 1.9], "got 1.9 at position 1 of 2"), (["5"], "got '5' at position 0"), (None, "None")],
)
def test_ids_that_are_no_integers_are_refused_and_not_rounded(policy, ids, message):
    async def main():
        with Engine(policy) as engine:
            with pytest.raises(SamplerError, match=message):
                await turn(engine, "s", ids)
            with pytest.raises(SamplerError, match=message):
                await engine.score(ids, 1)
            assert len((await turn(engine, "s", torch.tensor([5, 6]), opened=True)).ids) == 8

    asyncio.run(main())
