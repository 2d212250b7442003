"""One set of rules for what a turn may ask for: every sampler refuses the same, by name."""

import asyncio
import contextlib

import pytest
import torch

from treadle.errors import ConfigError, SamplerError
from treadle.sampler.checks import as_ids, check_ids, check_score
from treadle.sampler.engine import Engine
from treadle.sampler.remote import SglangSampler, VllmSampler
from treadle.sampler.router import Router
from treadle.sampler.simulated import SimulatedEngine
from treadle.testing import FakeSglang, FakeVllm, ScriptedSampler
from treadle.types import SamplingParams

PROMPT = (3, 4, 5)


@contextlib.contextmanager
def vllm(policy):
    with FakeVllm() as fake, VllmSampler(fake.url, stop_ids=()) as sampler:
        yield sampler


@contextlib.contextmanager
def sglang(policy):
    with FakeSglang() as fake, SglangSampler(fake.url, stop_ids=()) as sampler:
        yield sampler


@contextlib.contextmanager
def simulated(policy):
    yield SimulatedEngine()


@contextlib.contextmanager
def scripted(policy):
    yield ScriptedSampler(script=lambda session, turn: "x")


@contextlib.contextmanager
def routed(policy):
    yield Router({"a": SimulatedEngine()})


@pytest.mark.parametrize("kind", [Engine, vllm, sglang, simulated, scripted, routed])
def test_every_sampler_refuses_the_same_parameters_by_name(kind, policy):
    bad = [
        ("temperature", 1e-50),
        ("temperature", float("nan")),
        ("top_p", float("nan")),
        ("top_p", 0),
        ("top_k", 2.5),
        ("top_k", 2**40),
        ("max_new_tokens", 1.5),
        ("max_new_tokens", True),
        ("seed", 0.5),
        ("stop", ("\ud800",)),
        ("deadline_s", float("inf")),
        ("experts", "all"),
    ]

    async def main(sampler):
        async with contextlib.AsyncExitStack() as stack:
            if isinstance(sampler, Router):
                await stack.enter_async_context(sampler)
            await sampler.open("s")
            for name, value in bad:
                params = SamplingParams(**{"max_new_tokens": 2} | {name: value})
                with pytest.raises(ConfigError, match=rf"`{name}` must be .* got"):
                    await sampler.sample("s", PROMPT, params)
            done = await sampler.sample("s", PROMPT, SamplingParams(max_new_tokens=2, top_k=0))
            assert len(done.ids) == 2, "the session goes on"

    with kind(policy) as sampler:
        asyncio.run(main(sampler))


@pytest.mark.parametrize("kind", [vllm, sglang])
def test_ids_are_never_rounded_on_their_way_to_a_server(kind):
    async def main(sampler):
        await sampler.open("s")
        params = SamplingParams(max_new_tokens=2)
        for ids, message in (
            ([3, 4.7], "got 4.7 at position 1"),
            (["3"], "got '3'"),
            ([3, -1], "id -1 at position 1 of 2"),
            ([], "prompt is empty"),
        ):
            with pytest.raises(SamplerError, match=message):
                await sampler.sample("s", ids, params)
            with pytest.raises(SamplerError, match=message):
                await sampler.score(ids, 1)
        done = await sampler.sample("s", torch.tensor(PROMPT), params)
        assert done.prompt_tokens == 3

    with kind(None) as sampler:
        asyncio.run(main(sampler))


def test_starts_and_temperatures_of_scores_are_checked_alike():
    check_score([5, 6], 2, 1e-6)
    for start in (0, 3, 1.0, True, None):
        with pytest.raises(ConfigError, match=r"`start` must be in 1\.\.2"):
            check_score([5, 6], start, 1.0)
    for temperature in (0.0, 1e-50, float("nan"), float("inf"), None, 10**400):
        with pytest.raises(ConfigError, match="`temperature` must be a finite number"):
            check_score([5, 6], 1, temperature)


def test_ids_without_a_known_vocabulary_are_only_not_negative():
    assert as_ids([2**40]) == (2**40,)
    check_ids([2**40], None)
    with pytest.raises(SamplerError, match="id -2 at position 0 of 1 is not 0 or above"):
        check_ids([-2], None)
