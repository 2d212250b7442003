"""Several LoRA adapters in one batch, each against the merged weights."""

import asyncio
import dataclasses
import threading

import pytest
import torch

from tests.sampler.conftest import perturb, prompts, run_turns, turn
from treadle.config import LoraConfig
from treadle.errors import SamplerError, WeightsError
from treadle.models.linear import Adapter, LoraPair
from treadle.sampler.engine import Engine
from treadle.types import SamplingParams


def adapters_of(make_policy, count, dtype=torch.float32):
    """Adapters, and for each a policy that has it merged."""
    policies = [make_policy(dtype=dtype) for _ in range(count)]
    for i, policy in enumerate(policies):
        perturb(policy, seed=10 + i)
    return [p.adapter() for p in policies], policies


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.15)])
def test_adapters_in_one_batch_agree_with_their_merged_weights(make_policy, dtype, tolerance):
    given, merged = adapters_of(make_policy, 2, dtype)
    policy = make_policy(dtype=dtype)
    perturb(policy, seed=3)
    everyone = prompts(6, 21)

    async def main():
        with Engine(policy, adapters=True, prefill_tokens=32) as engine:
            for i, adapter in enumerate(given):
                engine.publish_adapter(f"a{i}", adapter, version=7 + i)

            async def one(i, prompt):
                name = ("", "a0", "a1")[i % 3]
                await engine.open(f"s{i}", adapter=name)
                return await turn(engine, f"s{i}", prompt, opened=True, seed=i, new=12)

            return await asyncio.gather(*(one(i, p) for i, p in enumerate(everyone)))

    done = asyncio.run(main())
    assert [set(d.versions) for d in done] == [{0}, {7}, {8}] * 2

    async def scored():
        scores = []
        for which, source in enumerate((policy, *merged)):
            with Engine(source) as engine:
                for i in range(which, 6, 3):
                    ids = [*everyone[i], *done[i].ids]
                    scores.append((i, await engine.score(ids, len(everyone[i]))))
        return [s for _, s in sorted(scores)]

    for mine, want in zip(done, asyncio.run(scored()), strict=True):
        assert mine.logprobs == pytest.approx(want, abs=tolerance)


def test_rows_without_an_adapter_are_those_of_an_engine_without_adapters(make_policy):
    (adapter,), _ = adapters_of(make_policy, 1)
    policy = make_policy()
    turns = [{"prompt": p, "seed": i} for i, p in enumerate(prompts(3))]
    want = run_turns(policy, turns)

    async def main():
        with Engine(policy, adapters=True) as engine:
            engine.publish_adapter("a", adapter)
            await engine.open("other", adapter="a")
            everyone = (turn(engine, f"s{i}", **each) for i, each in enumerate(turns))
            other = turn(engine, "other", turns[0]["prompt"], opened=True)
            return (await asyncio.gather(*everyone, other))[:-1]

    for got, each in zip(asyncio.run(main()), want, strict=True):
        assert got.ids == each.ids
        assert got.logprobs == pytest.approx(each.logprobs, abs=1e-5)


def test_an_adapter_shares_no_kv_with_others_nor_with_its_own_past(make_policy):
    given, _ = adapters_of(make_policy, 2)
    (prompt,) = prompts(1, 40)

    async def main():
        with Engine(make_policy(), adapters=True) as engine:
            engine.publish_adapter("a", given[0], version=1)
            engine.publish_adapter("b", given[1], version=1)
            cached = []
            for session, adapter in (("1", "a"), ("2", "b"), ("3", ""), ("4", "a"), ("5", "")):
                await engine.open(session, adapter=adapter)
                done = await turn(engine, session, prompt, opened=True, new=1)
                cached.append(done.cached_tokens)
            engine.publish_adapter("a", given[1], version=2)
            for session in "42":
                done = await turn(engine, session, prompt, opened=True, new=1)
                cached.append(done.cached_tokens)
            return cached

    assert asyncio.run(main()) == [0, 0, 0, 39, 39, 0, 39]


def test_an_adapter_is_scored_by_name(make_policy):
    (adapter,), (merged,) = adapters_of(make_policy, 1)
    (ids,) = prompts(1, 30)

    async def main(policy, **named):
        with Engine(policy, adapters=bool(named)) as engine:
            if named:
                engine.publish_adapter("a", adapter)
            return await engine.score(ids, 1, **named)

    mine = asyncio.run(main(make_policy(), adapter="a"))
    assert mine == pytest.approx(asyncio.run(main(merged)), abs=1e-4)


def test_full_fine_tuning_serves_adapters_on_its_own_weights(make_policy):
    (adapter,), (merged,) = adapters_of(make_policy, 1)
    (prompt,) = prompts(1)
    (want,) = run_turns(merged, [{"prompt": prompt}])

    async def main():
        with Engine(make_policy(lora=None), adapters=True) as engine:
            engine.publish_adapter("a", adapter)
            await engine.open("s", adapter="a")
            return await turn(engine, "s", prompt, opened=True)

    assert asyncio.run(main()).ids == want.ids


def test_what_is_wrong_with_an_adapter_is_said_and_nothing_changes(make_policy):
    (adapter,), _ = adapters_of(make_policy, 1)
    name, pair = next(iter(adapter.pairs.items()))
    nan = LoraPair(pair.a, torch.full_like(pair.b, torch.nan))
    narrow = LoraPair(pair.a[:, 1:], pair.b)
    bad = (
        (Adapter({name: nan}, 1.0), "B is not finite"),
        (Adapter({name: narrow}, 1.0), "do not fit a linear of"),
        (Adapter({"model.x": pair}, 1.0), "`model.x`, which the model does not have"),
        (Adapter({}, 1.0), "adapts nothing"),
    )

    async def main():
        with Engine(make_policy(), adapters=True) as engine:
            for each, message in bad:
                with pytest.raises(WeightsError, match=message):
                    engine.publish_adapter("a", each)
            with pytest.raises(SamplerError, match="adapter `a` is not served"):
                await engine.open("s", adapter="a")
            engine.publish_adapter("a", adapter, version=2)
            with pytest.raises(WeightsError, match="version 2 is served already"):
                engine.publish_adapter("a", adapter, version=2)
            await engine.open("s", adapter="a")
            with pytest.raises(SamplerError, match="used by 1 open sessions, first `s`"):
                engine.drop_adapter("a")
            await engine.release("s")
            engine.drop_adapter("a")
            with pytest.raises(SamplerError, match="not served"):
                await engine.open("s", adapter="a")

    asyncio.run(main())
    with Engine(make_policy()) as engine, pytest.raises(SamplerError, match="adapters=True"):
        engine.publish_adapter("a", adapter)


def test_an_adapter_may_cover_some_linears_and_have_a_rank_of_its_own(make_policy):
    whole = make_policy(lora=LoraConfig(rank=2))
    perturb(whole)
    adapter = whole.adapter()
    some = dataclasses.replace(
        adapter, pairs={n: p for n, p in adapter.pairs.items() if n.endswith(("q_proj", "up_proj"))}
    )
    with torch.no_grad():
        for name, pair in whole.pairs.items():
            if name not in some.pairs:
                pair.b.zero_()
    whole.refresh()
    (prompt,) = prompts(1)
    (want,) = run_turns(whole, [{"prompt": prompt}])

    async def main():
        with Engine(make_policy(), adapters=True) as engine:
            engine.publish_adapter("a", some)
            await engine.open("s", adapter="a")
            return await engine.sample("s", prompt, SamplingParams(max_new_tokens=8))

    assert asyncio.run(main()).ids == want.ids


def test_an_adapter_cannot_be_dropped_from_under_a_session_that_was_just_opened(make_policy):
    (adapter,), _ = adapters_of(make_policy, 1)
    (prompt,) = prompts(1)

    async def main():
        with Engine(make_policy(), adapters=True) as engine:
            engine.publish_adapter("x", adapter, 1)
            entered, gate = threading.Event(), threading.Event()
            engine._ask(lambda: (entered.set(), gate.wait()))
            await asyncio.to_thread(entered.wait)
            drop = asyncio.create_task(asyncio.to_thread(engine.drop_adapter, "x"))
            async with asyncio.timeout(30):
                while engine._inbox.empty():
                    await asyncio.sleep(0.001)
            await engine.open("s", adapter="x")
            gate.set()
            with pytest.raises(SamplerError, match="used by 1 open sessions, first `s`"):
                await drop
            done = await turn(engine, "s", prompt, opened=True)
            assert set(done.versions) == {1}
            await engine.release("s")
            await asyncio.to_thread(engine.drop_adapter, "x")

    asyncio.run(main())
