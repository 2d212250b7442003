"""The experts that a mixture chose, per token, against the library's own routers."""

import asyncio
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.sampler.conftest import prompts, reference_logprobs, turn
from treadle.config import LoraConfig
from treadle.errors import ConfigError, SamplerError
from treadle.models import forward
from treadle.models.load import load
from treadle.models.policy import Policy
from treadle.models.tiny import build_random_moe
from treadle.sampler.engine import Engine

LAYERS, TOP_K = 3, 2


@pytest.fixture(scope="module")
def moe_directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("moe") / "tiny"
    build_random_moe(
        path, layers=LAYERS, hidden=48, experts=6, experts_per_token=TOP_K, max_context=256
    )
    return path


@pytest.fixture(scope="module")
def moe_library(moe_directory):
    return AutoModelForCausalLM.from_pretrained(moe_directory, dtype=torch.float32).eval()


@pytest.fixture
def make_moe(moe_directory):
    def make(dtype=torch.float32):
        loaded = replace(load(str(moe_directory), max_context=256), stop_ids=())
        return Policy(loaded, lora=LoraConfig(rank=4), dtype=dtype)

    return make


def array(choices):
    flat = np.frombuffer(choices.data, "<u2").astype(np.int64)
    return flat.reshape(choices.num_positions, choices.layers, choices.top_k)


@torch.no_grad()
def reference_choices(library, ids):
    logits = library(input_ids=torch.tensor([ids]), output_router_logits=True).router_logits
    return torch.stack([each.topk(TOP_K, -1).indices for each in logits], 1).numpy()


def same_sets(mine, want):
    return (np.sort(mine, -1) == np.sort(want, -1)).all()


def test_full_choices_are_those_of_the_librarys_routers(make_moe, moe_library):
    given = prompts(4, 25)

    async def main():
        with Engine(make_moe(), prefill_tokens=16) as engine:
            assert engine.capabilities.experts
            return await asyncio.gather(
                *(
                    turn(engine, f"s{i}", p, seed=i, new=10, experts="full")
                    for i, p in enumerate([*given, given[0]])
                )
            )

    for prompt, done in zip([*given, given[0]], asyncio.run(main()), strict=True):
        assert done.logprobs == pytest.approx(
            reference_logprobs(moe_library, prompt, done), abs=1e-4
        )
        ids = [*prompt, *done.ids[:-1]]
        assert (done.experts.first, done.experts.layers) == (0, LAYERS)
        assert same_sets(array(done.experts), reference_choices(moe_library, ids))


def test_deltas_of_a_session_join_to_the_whole_also_where_kv_was_shared(make_moe, moe_library):
    (prompt,) = prompts(1, 25)

    async def main():
        with Engine(make_moe()) as engine:
            await turn(engine, "other", prompt, new=1)
            ids, parts = list(prompt), []
            await engine.open("s")
            for i in range(3):
                done = await turn(engine, "s", ids, opened=True, new=7, experts="delta", seed=i)
                assert done.cached_tokens > 0
                parts.append(done.experts)
                ids = [*ids, *done.ids, *prompts(1, 4, seed=i)[0]]
            rewritten = [*ids[:30], 9, 9]
            last = await turn(engine, "s", rewritten, opened=True, new=1, experts="delta")
            return ids, parts, last.experts

    ids, parts, last = asyncio.run(main())
    assert parts[0].first == 0
    joined = np.concatenate([array(part) for part in parts])
    for before, after in itertools.pairwise(parts):
        assert after.first == before.first + before.num_positions
    assert same_sets(joined, reference_choices(moe_library, ids[: len(joined)]))
    assert last.first == 30 and last.num_positions == 2


def test_nothing_is_returned_unless_asked_and_a_dense_model_says_so(make_moe, policy):
    async def main():
        with Engine(make_moe()) as engine:
            assert (await turn(engine, "s", [5, 6, 7])).experts is None
            with pytest.raises(ConfigError, match="`experts` must be"):
                await turn(engine, "t", [5], experts="some")
        with Engine(policy) as engine:
            assert not engine.capabilities.experts
            with pytest.raises(SamplerError, match="dense model"):
                await turn(engine, "s", [5], experts="full")

    asyncio.run(main())


def test_the_trainers_forward_can_record_its_choices_too(make_moe, moe_library):
    """What replay and parity compare with."""
    policy = make_moe()
    ids = prompts(1, 20)[0]
    from treadle.models.attention import PackedAttend
    from treadle.types import Layout, Segment

    attend = PackedAttend(Layout((Segment(0, 20, None, 0),)))
    choices = {}
    with torch.no_grad():
        forward.run(
            policy.module, torch.tensor([ids]), attend.positions, attend,
            policy.snapshot().weights, choices,
        )  # fmt: skip
    mine = torch.stack([choices[name] for name in forward.routers(policy.module)], 1).numpy()
    assert same_sets(mine, reference_choices(moe_library, ids))


def test_a_mixture_in_bf16_agrees_with_its_own_scores(make_moe):
    given = prompts(4, 20)

    async def main():
        with Engine(make_moe(torch.bfloat16)) as engine:
            done = await asyncio.gather(*(turn(engine, f"s{i}", p) for i, p in enumerate(given)))
            scores = [
                await engine.score([*p, *d.ids], len(p)) for p, d in zip(given, done, strict=True)
            ]
            return done, scores

    done, scores = asyncio.run(main())
    pairs = [
        (a, b)
        for d, s in zip(done, scores, strict=True)
        for a, b in zip(d.logprobs, s, strict=True)
    ]
    assert sum(abs(a - b) for a, b in pairs) / len(pairs) < 0.1


def test_a_cancelled_turn_has_told_nothing(make_moe):
    (prompt,) = prompts(1)

    async def main():
        with Engine(make_moe()) as engine:
            await engine.open("s")
            first = asyncio.create_task(
                turn(engine, "s", prompt, opened=True, new=200, experts="delta")
            )
            async with asyncio.timeout(30):
                while engine.stats().decoded_tokens < 3:
                    await asyncio.sleep(0.001)
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            return await turn(engine, "s", prompt, opened=True, new=3, experts="delta")

    done = asyncio.run(main())
    assert done.experts.first == 0
    assert done.experts.num_positions == len(prompt) + 2
