"""Time to answer of base, adapter and merged weights, in the built-in engine and in vLLM.

One prompt of 96 tokens, one answer of 48, nothing else running. For adapter and merged weights
also the time of the publication, writing included, and of the first answer after it. The built-in
engine merges an adapter when it is published, so that its adapter and its merged weights differ
in the publication alone; vLLM keeps an adapter apart and computes it per token.

Takes: a model. Gives: seconds per side and kind of weights, for a benchmark's detail.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.peers import vllm_cpu
from treadle.config import LoraConfig
from treadle.models.load import LoadedModel
from treadle.models.lora import save_adapter, save_merged
from treadle.models.policy import Policy
from treadle.sampler.engine import Engine
from treadle.types import Sampler, SamplingParams

PROMPT, NEW = 96, 48

Times = dict[str, Any]


def of_engine(loaded: LoadedModel, rounds: int) -> dict[str, Times]:
    times: dict[str, Times] = {}
    for kind, lora in (("adapter", LoraConfig()), ("merged", None)):
        policy = Policy(loaded, lora=lora, dtype=torch.bfloat16)
        with Engine(policy, max_rows=1) as engine:
            ask = _asker(engine, loaded.shape.vocab)
            ask()  # warm up
            if lora is not None:
                times["base"] = {"answer_s": [ask() for _ in range(rounds)]}
            _move(policy)
            times[kind] = _published(lambda engine=engine: engine.publish(1), ask, rounds)
    return times


def of_vllm(loaded: LoadedModel, rounds: int) -> dict[str, Times]:
    """Base and merged on a server without adapters, the adapter on one with them."""
    times: dict[str, Times] = {}
    policy = Policy(loaded, lora=LoraConfig(), dtype=torch.bfloat16)
    _move(policy)
    with _side(loaded.path, lora=False) as side, TemporaryDirectory() as folder:
        ask = _asker(side.sampler, loaded.shape.vocab)
        ask()
        times["base"] = {"answer_s": [ask() for _ in range(rounds)]}

        def merged() -> None:
            save_merged(policy, Path(folder) / "merged")
            asyncio.run(side.sampler.adopt(1, Path(folder) / "merged"))

        times["merged"] = _published(merged, ask, rounds)
    with _side(loaded.path, lora=True) as side, TemporaryDirectory() as folder:
        ask = _asker(side.sampler, loaded.shape.vocab)
        ask()
        times["base_of_adapters"] = {"answer_s": [ask() for _ in range(rounds)]}

        def adapter() -> None:
            save_adapter(policy, Path(folder) / "adapter")
            asyncio.run(side.sampler.adopt(1, Path(folder) / "adapter"))

        times["adapter"] = _published(adapter, ask, rounds)
    return times


@contextmanager
def _side(path: Path, *, lora: bool) -> Iterator[vllm_cpu.Side]:
    side = vllm_cpu.Side(path, max_context=256, lora=lora)
    try:
        with side.awake():
            yield side
    finally:
        side.close()


def _asker(sampler: Sampler, vocab: int) -> Callable[[], float]:
    """Seconds of one answer; every call has a new prompt, so that no cache helps."""
    rng = random.Random(0)
    count = 0

    def ask() -> float:
        nonlocal count
        count += 1
        ids = [rng.randrange(1000, vocab) for _ in range(PROMPT)]

        async def answer(name: str) -> None:
            await sampler.open(name)
            done = await sampler.sample(name, ids, SamplingParams(max_new_tokens=NEW, seed=count))
            await sampler.release(name)
            assert len(done.ids) == NEW

        start = time.perf_counter()
        asyncio.run(answer(f"answer {count}"))
        return time.perf_counter() - start

    return ask


def _published(publish: Callable[[], None], ask: Callable[[], float], rounds: int) -> Times:
    start = time.perf_counter()
    publish()
    seconds = time.perf_counter() - start
    return {
        "publish_s": seconds,
        "first_answer_s": ask(),
        "answer_s": [ask() for _ in range(rounds)],
    }


@torch.no_grad()
def _move(policy: Policy) -> None:
    """An optimiser step of sorts: adapters that do something."""
    generator = torch.Generator().manual_seed(0)
    for p in policy.parameters().values():
        p.add_(torch.randn(p.shape, generator=generator) * 0.02 * p.shape[-1] ** -0.5)
    policy.refresh()
