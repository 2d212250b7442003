"""Do trainer and engine agree on the logprobs of sampled tokens? A matrix of how they may differ.

A dense model (SmolLM2-135M-Instruct) and a mixture of experts (a small random Qwen3-MoE), in fp32
and bf16, with LoRA and with full weights, moved by an update of the size of some training
steps. The engine samples at temperature 1: each prompt alone or all in one batch, with its KV
computed or found in the prefix cache. The trainer then scores the same tokens, packed as it packs
them for training.

    python benchmarks/parity.py --json

A mixture's routers choose by the largest of nearly equal numbers: where trainer and engine choose
other experts for a token (a flip), what follows differs by more than rounding. Tokens after the
first flip of their sequence are counted apart.

Figures, in nats over sampled tokens:
- parity.fp32_max_abs: largest |difference|, dense, fp32, all cells;
- parity.bf16_mean_abs: mean |difference|, dense, bf16, all cells;
- parity.moe_fp32_max_abs: largest |difference| of tokens before any flip, mixture, fp32;
- parity.moe_flipped_frac: share of the mixture's tokens after a flip, bf16.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from treadle import machine

TUNING = machine.tune()

from benchmarks.common import finish, say

NO_STOP = (-1,)
ASKED = (
    ("You are a calculator. Reply with the answer only.", "What is 17 + 25?"),
    ("Write like a poet.", "Write a short poem about the sea."),
    ("Explain things to children.", "Why is the sky blue?"),
    ("Answer in lists.", "Which animals live in the desert?"),
    ("Translate to French.", "Good morning, how are you?"),
    ("A historian answers.", "What happened in the year 1969?"),
    ("Be a friendly cook.", "Give me a recipe for a simple soup."),
    ("Think before you answer.", "Sort these numbers: 9, 4, 7, 1."),
)
TEMPLATE_TOKENS = 8
"""Prompts that count as computed may share this many, the start of the chat template."""
UPDATE = 0.002
"""Relative size of the update that moves every trained tensor: some steps of training."""


LIMIT_S = 7200.0
"""For one completion: other work may have the machine."""


def make_policy(path: Any, dtype: Any, lora: bool) -> Any:
    import torch

    from treadle.config import LoraConfig
    from treadle.models.load import load
    from treadle.models.policy import Policy

    loaded = replace(load(str(path), max_context=512), stop_ids=NO_STOP)
    policy = Policy(loaded, lora=LoraConfig(rank=8) if lora else None, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in policy.parameters().values():
            # B starts at 0 and A at about 1 / sqrt(inputs); both move by that measure.
            size = float(p.std()) if bool(p.any()) and p.numel() > 1 else p.shape[-1] ** -0.5
            p.add_(torch.randn(p.shape, generator=generator) * UPDATE * size)
    policy.refresh()
    return policy


def make_prompts(tokenizer: Any, vocab: int, dense: bool) -> list[list[int]]:
    if not dense:
        rng = random.Random(0)
        return [rng.choices(range(3, vocab), k=20 + 7 * i) for i in range(len(ASKED))]
    return [
        tokenizer.apply_chat_template(
            [{"role": "system", "content": system}, {"role": "user", "content": question}],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
        )
        for system, question in ASKED
    ]


async def sample(
    policy: Any, prompts: list[list[int]], new: int, *, cached: bool, batch: bool, experts: str
) -> list[Any]:
    """One completion per prompt."""
    from treadle.sampler.engine import Engine
    from treadle.types import SamplingParams

    rows = len(prompts) if batch else 1
    async with Engine(policy, max_rows=rows, kv_tokens=8192) as engine:

        async def one(index: int, name: str, tokens: int) -> Any:
            session = f"{name}/{index}"
            await engine.open(session)
            params = SamplingParams(
                max_new_tokens=tokens, seed=index, experts=experts, deadline_s=LIMIT_S
            )
            done = await engine.sample(session, prompts[index], params)
            await engine.release(session)
            return done

        if cached:
            await asyncio.gather(*(one(i, "first", 1) for i in range(len(prompts))))
        done = await asyncio.gather(*(one(i, "turn", new) for i in range(len(prompts))))
    found = [d.cached_tokens for d in done]
    shared = [len(p) - 1 if cached else TEMPLATE_TOKENS for p in prompts]
    ok = all((f >= n) if cached else (f <= n) for f, n in zip(found, shared, strict=True))
    assert ok, f"cached tokens {found}"
    return done


def trainer_logprobs(policy: Any, prompts: list[list[int]], done: list[Any]) -> list[list[float]]:
    """As a training step computes them, all sequences in one pack."""
    import torch

    from treadle.types import Layout, Segment

    segments, ids, index, targets, start = [], [], [], [], 0
    for prompt, each in zip(prompts, done, strict=True):
        row = [*prompt, *each.ids]
        segments.append(Segment(start, len(row), None, 0))
        ids += row
        index += range(start + len(prompt) - 1, start + len(row) - 1)
        targets += each.ids
        start += len(row)
    with torch.no_grad():
        hidden = policy.hidden(torch.tensor(ids), Layout(tuple(segments)))
        logp, _ = policy.logprobs(hidden[index], torch.tensor(targets), 1.0)
    return [list(part) for part in logp.split([len(d.ids) for d in done])]


def first_flips(policy: Any, prompts: list[list[int]], done: list[Any]) -> list[int]:
    """Of each sequence, the first position that trainer and engine sent to other experts."""
    import numpy as np
    import torch

    from treadle.models import forward
    from treadle.models.attention import PackedAttend
    from treadle.types import Layout, Segment

    names = forward.routers(policy.module)
    flips: list[int] = []
    for prompt, each in zip(prompts, done, strict=True):
        ids = [*prompt, *each.ids[:-1]]
        attend = PackedAttend(Layout((Segment(0, len(ids), None, 0),)))
        choices: dict[str, Any] = {}
        weights = policy.snapshot().weights
        with torch.no_grad():
            forward.run(
                policy.module, torch.tensor([ids]), attend.positions, attend, weights, choices
            )
        mine = torch.stack([choices[name] for name in names], 1).sort(-1).values.numpy()
        theirs = np.sort(np.frombuffer(each.experts.data, "<u2").reshape(mine.shape), -1)
        differ = (mine != theirs).any((1, 2)).nonzero()[0]
        flips.append(int(differ[0]) if len(differ) else len(ids))
    return flips


def compare(policy: Any, prompts: list[list[int]], done: list[Any], dense: bool) -> dict[str, Any]:
    scored = trainer_logprobs(policy, prompts, done)
    flips = [sys.maxsize] * len(done) if dense else first_flips(policy, prompts, done)
    same: list[float] = []
    flipped: list[float] = []
    for prompt, each, mine, flip in zip(prompts, done, scored, flips, strict=True):
        for t, (a, b) in enumerate(zip(mine, each.logprobs, strict=True)):
            # Token t was drawn from what position len(prompt) + t - 1 gave.
            kind = same if len(prompt) + t - 1 < flip else flipped
            kind.append(abs(float(a) - b))
    return {
        "tokens": len(same),
        "mean_abs": sum(same) / max(1, len(same)),
        "max_abs": max(same, default=0.0),
        "flipped_tokens": len(flipped),
        "flipped_mean_abs": sum(flipped) / max(1, len(flipped)),
        "flipped_max_abs": max(flipped, default=0.0),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--new", type=int, default=48, help="tokens sampled per prompt")
    parser.add_argument("--json", action="store_true", help="only the document on stdout")
    args = parser.parse_args()

    import torch

    from treadle.api import load_model
    from treadle.config import ModelConfig
    from treadle.models.pull import pull
    from treadle.models.tiny import build_random_moe

    pull("smollm2-135m")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        moe = Path(folder) / "moe"
        build_random_moe(moe, layers=4, hidden=128, experts=16, experts_per_token=4)
        dense = load_model(ModelConfig(name="smollm2-135m")).path
        for model, path in (("dense", dense), ("moe", moe)):
            for dtype in (torch.float32, torch.bfloat16):
                for lora in (True, False):
                    policy = make_policy(path, dtype, lora)
                    tokenizer = policy.loaded.tokenizer
                    prompts = make_prompts(tokenizer, policy.shape.vocab, model == "dense")
                    for batch in (False, True):
                        for cached in (False, True):
                            experts = "" if model == "dense" else "full"
                            done = asyncio.run(
                                sample(
                                    policy,
                                    prompts,
                                    args.new,
                                    cached=cached,
                                    batch=batch,
                                    experts=experts,
                                )
                            )
                            row = {
                                "model": model,
                                "dtype": str(dtype).removeprefix("torch."),
                                "weights": "lora" if lora else "full",
                                "batch": "batch" if batch else "alone",
                                "prefix": "cached" if cached else "computed",
                            } | compare(policy, prompts, done, model == "dense")
                            rows.append(row)
                            say(
                                " ".join(str(v) for v in list(row.values())[:5])
                                + f": mean {row['mean_abs']:.2g}, max {row['max_abs']:.2g}, "
                                f"{row['flipped_tokens']} of "
                                f"{row['tokens'] + row['flipped_tokens']} after a flip"
                            )

    def worst(key: str, model: str, dtype: str) -> float:
        return max(r[key] for r in rows if (r["model"], r["dtype"]) == (model, dtype))

    def average(model: str, dtype: str) -> float:
        cells = [r for r in rows if (r["model"], r["dtype"]) == (model, dtype)]
        total = sum(r["mean_abs"] * r["tokens"] for r in cells)
        return total / sum(r["tokens"] for r in cells)

    mixture = [r for r in rows if (r["model"], r["dtype"]) == ("moe", "bfloat16")]
    flipped = sum(r["flipped_tokens"] for r in mixture)
    figures = {
        "parity.fp32_max_abs": worst("max_abs", "dense", "float32"),
        "parity.bf16_mean_abs": average("dense", "bfloat16"),
        "parity.moe_fp32_max_abs": worst("max_abs", "moe", "float32"),
        "parity.moe_flipped_frac": flipped
        / sum(r["tokens"] + r["flipped_tokens"] for r in mixture),
    }
    # Figures are rounded to four places; differences in fp32 are smaller.
    exact = {key: float(value) for key, value in figures.items()}
    finish("parity", figures, {"tuning": TUNING.applied, "exact": exact, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
