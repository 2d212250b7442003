"""A tiny Llama with grouped queries, and its library twin as the reference."""

import asyncio
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from treadle.config import LoraConfig
from treadle.models.load import load
from treadle.models.policy import Policy
from treadle.models.tiny import build_random
from treadle.sampler.engine import Engine
from treadle.types import SamplingParams


@pytest.fixture(scope="session")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny"
    build_random(path, layers=3, hidden=48, heads=6, kv_heads=2, intermediate=96, max_context=256)
    return path


@pytest.fixture(scope="session")
def library(directory):
    return (
        AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        .eval()
        .requires_grad_(False)
    )


@pytest.fixture
def make_policy(directory):
    """A fresh policy; no stop ids unless asked, so that lengths are known."""

    def make(stop_ids=(), dtype=torch.float32, lora=LoraConfig(rank=4), max_context=256):
        loaded = replace(load(str(directory), max_context=max_context), stop_ids=stop_ids)
        return Policy(loaded, lora=lora, dtype=dtype)

    return make


@pytest.fixture
def policy(make_policy):
    return make_policy()


@torch.no_grad()
def perturb(policy, seed=0, scale=0.3):
    """An optimiser step of sorts: move every master and refresh."""
    generator = torch.Generator().manual_seed(seed)
    for p in policy.parameters().values():
        p.add_(torch.randn(p.shape, generator=generator) * scale * p.shape[-1] ** -0.5)
    policy.refresh()


def prompts(count, length=20, seed=0, vocab=200):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab, (length,), generator=generator).tolist() for _ in range(count)]


async def turn(engine, session, prompt, *, group="", new=8, opened=False, **params):
    if not opened:
        await engine.open(session, group=group)
    return await engine.sample(session, prompt, SamplingParams(max_new_tokens=new, **params))


def run_turns(policy, turns, **options):
    """All turns at once on a new engine; [(prompt, params...)] -> completions."""

    async def main():
        with Engine(policy, **options) as engine:
            return await asyncio.gather(
                *(turn(engine, f"s{i}", **each) for i, each in enumerate(turns))
            )

    return asyncio.run(main())


@torch.no_grad()
def reference_logprobs(library, prompt, completion, temperature=1.0):
    """Teacher-forced logprobs of the library's own forward."""
    ids = torch.tensor([[*prompt, *completion.ids]])
    logits = library(input_ids=ids).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].tolist()
