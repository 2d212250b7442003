"""Decode throughput of the built-in engine against transformers' generate, in one process.

SmolLM2-135M-Instruct, bf16, one policy: 1, 8, 32 and 64 sequences of 96 prompt and 48 new tokens,
no stop. The sequences of one measurement share 8 prompts (a group of 8 each at 64), as rollouts
do; `distinct` repeats 64 with distinct prompts. Engine and peers are measured in turn, several
times; medians of the interleaved rounds are compared.

    python benchmarks/engine.py --json

Figures:
- engine.vs_generate_64: end to end, prefill included, over generate with a dynamic cache;
- engine.roofline_fraction_64: 2 x all parameters (head included) x decoded tokens/s at 64 rows,
  over the best bf16 1024^3 product of the same process. Decoding alone, prefill excluded; median
  of the rounds, which alternate with the product. `_best` takes the fastest round: neighbours on
  a shared machine slow both sides by turns;
- engine.tokens_per_s_N: end to end at N sequences;
- engine.prefix_hit_8turn: share of all prompt tokens whose KV was there, over 8 sessions of 8 turns
  of a tool loop: a first prompt of their own of 96 tokens, answers of 48, observations of 16.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import time
from typing import Any

from treadle import machine

TUNING = machine.tune()

from benchmarks.common import best_gemm_flops, finish, median, say

PROMPT, NEW = 96, 48
NO_STOP = (-1,)


class Ours:
    """The engine as a run drives it."""

    def __init__(self) -> None:
        from dataclasses import replace

        from treadle.api import load_model, policy_of
        from treadle.config import ModelConfig, RunConfig
        from treadle.sampler.engine import Engine

        config = RunConfig(
            model=ModelConfig(name="smollm2-135m", dtype="bfloat16", max_context=1024)
        )
        loaded = replace(load_model(config.model), stop_ids=NO_STOP)
        self.vocab = loaded.shape.vocab
        self.parameters = loaded.shape.parameters
        self.path = loaded.path
        self.policy = policy_of(loaded, config)
        self.engine = Engine(self.policy, max_rows=64).start()
        self._round = 0

    def generate(self, prompts: list[list[int]]) -> dict[str, float]:
        """Seconds end to end, and decoded tokens per second after prefill."""
        from treadle.types import SamplingParams

        self._round += 1

        async def one(index: int, ids: list[int]) -> int:
            name = f"{self._round}/{index}"
            await self.engine.open(name, group=f"{self._round}/{ids[:8]}")
            params = SamplingParams(max_new_tokens=NEW, seed=index)
            completion = await self.engine.sample(name, ids, params)
            await self.engine.release(name)
            return len(completion.ids)

        async def all_of(limit: int) -> int:
            return sum(await asyncio.gather(*(one(i, p) for i, p in enumerate(prompts))))

        before = self.engine.stats()
        start = time.perf_counter()
        tokens = asyncio.run(all_of(NEW))
        seconds = time.perf_counter() - start
        after = self.engine.stats()
        decode_s = after.decode_s - before.decode_s
        steps = after.decode_steps - before.decode_steps
        assert tokens == NEW * len(prompts)
        return {
            "seconds": seconds,
            "tokens_per_s": tokens / seconds,
            "decode_tokens_per_s": (after.decode_step_tokens - before.decode_step_tokens)
            / decode_s,
            "step_ms": 1000 * decode_s / steps,
        }

    def tool_loop(self, sessions: int = 8, turns: int = 8, observation: int = 16) -> float:
        """Prefix hits over queries, in tokens, of a loop whose context grows by every turn."""
        from treadle.types import SamplingParams

        rng = random.Random(0)

        def some(count: int) -> list[int]:
            return [rng.randrange(1000, self.vocab) for _ in range(count)]

        async def one(index: int) -> None:
            name, prompt = f"loop/{index}", some(PROMPT)
            await self.engine.open(name)
            for turn in range(turns):
                params = SamplingParams(max_new_tokens=NEW, seed=turn)
                completion = await self.engine.sample(name, prompt, params)
                prompt = [*prompt, *completion.ids, *some(observation)]
            await self.engine.release(name)

        async def all_of() -> float:
            before = await self.engine.load()
            await asyncio.gather(*(one(i) for i in range(sessions)))
            after = await self.engine.load()
            hits = after.prefix_hit_tokens - before.prefix_hit_tokens
            return hits / (after.prefix_query_tokens - before.prefix_query_tokens)

        return asyncio.run(all_of())

    def close(self) -> None:
        self.engine.close()


class Generate:
    """transformers' generate on a model of its own, in the same process."""

    def __init__(self, path: Any, cache: str | None) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
        self._model.generation_config.eos_token_id = None
        self._cache = {} if cache is None else {"cache_implementation": cache}

    def generate(self, prompts: list[list[int]]) -> dict[str, float]:
        import torch

        ids = torch.tensor(prompts)
        start = time.perf_counter()
        with torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NEW,
                min_new_tokens=NEW,
                do_sample=True,
                temperature=1.0,
                top_p=1.0,
                top_k=0,
                pad_token_id=0,
                disable_compile=True,
                **self._cache,
            )
        seconds = time.perf_counter() - start
        tokens = out.shape[1] * out.shape[0] - ids.numel()
        return {"seconds": seconds, "tokens_per_s": tokens / seconds}


def make_prompts(count: int, distinct: int, vocab: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    few = [[rng.randrange(1000, vocab) for _ in range(PROMPT)] for _ in range(distinct)]
    return [few[i * distinct // count] for i in range(count)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="only the document on stdout")
    args = parser.parse_args()

    from treadle.models.pull import pull

    pull("smollm2-135m")
    ours = Ours()
    dynamic = Generate(ours.path, None)
    static = Generate(ours.path, "static")
    cases = {"1": (1, 1), "8": (8, 1), "32": (32, 4), "64": (64, 8), "64_distinct": (64, 64)}
    detail: dict[str, Any] = {}
    roofline: list[float] = []
    try:
        for name, (count, distinct) in cases.items():
            rows: dict[str, list[dict[str, float]]] = {"engine": [], "dynamic": [], "static": []}
            prompts = make_prompts(count, distinct, ours.vocab, 0)
            for side in (ours, dynamic, static):
                side.generate(prompts)  # warm up kernels and pages
            for turn in range(args.rounds):
                prompts = make_prompts(count, distinct, ours.vocab, turn + 1)
                for _ in range(3 if name == "64" else 1):
                    rows["engine"].append(ours.generate(prompts))
                    roofline.append(best_gemm_flops(0.3))
                rows["dynamic"].append(dynamic.generate(prompts))
                rows["static"].append(static.generate(prompts))
                say(
                    f"{name:>11}: engine {rows['engine'][-1]['tokens_per_s']:7.1f} tok/s, dynamic "
                    f"{rows['dynamic'][-1]['tokens_per_s']:6.1f}, static "
                    f"{rows['static'][-1]['tokens_per_s']:6.1f}, load {os.getloadavg()[0]:.1f}"
                )
            detail[name] = rows
        prefix_hit = ours.tool_loop()
    finally:
        ours.close()

    def rate(case: str, side: str, key: str = "tokens_per_s") -> float:
        return median([r[key] for r in detail[case][side]])

    best_decode = max(r["decode_tokens_per_s"] for r in detail["64"]["engine"])
    median_decode = rate("64", "engine", "decode_tokens_per_s")
    flops = 2.0 * ours.parameters
    figures = {
        "engine.vs_generate_64": rate("64", "engine") / rate("64", "dynamic"),
        "engine.vs_generate_64_distinct": rate("64_distinct", "engine")
        / rate("64_distinct", "dynamic"),
        "engine.vs_static_64": rate("64", "engine") / rate("64", "static"),
        "engine.roofline_fraction_64": flops * median_decode / max(roofline),
        "engine.roofline_fraction_64_best": flops * best_decode / max(roofline),
        "engine.gemm_gflops": max(roofline) / 1e9,
        "engine.prefix_hit_8turn": prefix_hit,
    }
    figures |= {f"engine.tokens_per_s_{name}": rate(name, "engine") for name in cases}
    finish("engine", figures, {"tuning": TUNING.applied, "cases": detail, "roofline": roofline})
    return 0


if __name__ == "__main__":
    sys.exit(main())
