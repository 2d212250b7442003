"""One GRPO step: Treadle against TRL's GRPOTrainer, interleaved in one run on one machine.

Setting: SmolLM2-135M-Instruct, LoRA r=8 on all linears, 8 prompts x 8 completions x <= 48 new
tokens, bf16, temperature 1, natural stop; every group is trained (zero-advantage groups too) on
both sides; every step starts from step-0 weights, on the same prompts for both. The peer runs in
its fastest CPU setting found: bf16 weights, the same thread and allocator settings as ours, and
the micro-batch and cache that `--sweep` found fastest. Only one side works at a time.

    python -m benchmarks.step_vs_trl --json            # makes the peer's environment itself
    python -m benchmarks.step_vs_trl --sweep --json    # the peer's settings, about 12 minutes

Figures:
- step_vs_trl.speedup: median TRL step / median Treadle step over the interleaved steps;
- step_vs_trl.peak_gib: our process's peak resident memory;
- step_vs_trl.treadle_skipping_s: our step again, on the same prompts, when groups whose rewards
  are all equal are not trained: their gradient is 0. Not part of the speedup.
--sweep writes results/step_vs_trl_sweep.json: seconds of one warm peer step by setting.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from treadle import machine

TUNING = machine.tune()

from benchmarks.common import finish, median, peer_venv, say, timed

PEER = (
    "transformers==5.24.0",
    "trl==1.16.0",
    "peft==0.21.2",
    "accelerate==1.15.0",
    "datasets==5.2.0",
)
PROMPTS, GROUP, MAX_NEW = 8, 8, 48
MICRO, CACHE = 16, ""
"""The peer's fastest setting: sequences of a micro-batch, and its generation cache ("" =
dynamic)."""
SWEEP = ((8, ""), (16, ""), (32, ""), (64, ""), (16, "static"))
SYSTEM = "You are a calculator. Reply with the answer only."


def prompts(steps: int, seed: int) -> list[list[dict[str, Any]]]:
    rng = random.Random(seed)

    def row() -> dict[str, Any]:
        x, y = rng.randint(1, 10), rng.randint(1, 10)
        messages = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"What is {x} + {y}?"},
        ]
        return {"messages": messages, "answer": str(x + y)}

    return [[row() for _ in range(PROMPTS)] for _ in range(steps)]


class Trl:
    """The peer, a step at a time."""

    def __init__(
        self,
        model: Path,
        rows: list[list[dict[str, Any]]],
        threads: int,
        micro: int = MICRO,
        cache: str = CACHE,
    ) -> None:
        setting = {
            "model": str(model),
            "prompts": rows,
            "group": GROUP,
            "max_new": MAX_NEW,
            "threads": threads,
            "micro": micro,
            "cache": cache,
        }
        # What machine.tune sets for us by mallopt.
        tunables = ":".join(
            f"glibc.malloc.{name}"
            for name in (
                "mmap_max=0",
                "trim_threshold=17179869184",
                "top_pad=67108864",
                "arena_max=1",
            )
        )
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the peer
        self._process = subprocess.Popen(
            [
                str(peer_venv("trl", PEER)),
                str(Path(__file__).parent / "peers" / "trl_step.py"),
                json.dumps(setting),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, "GLIBC_TUNABLES": tunables},
        )
        self._answer()

    def step(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("TRL "):
                return json.loads(line[4:])
        self._log.seek(0)
        raise RuntimeError(f"the peer ended:\n{self._log.read()[-3000:]}")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class Treadle:
    """Our side, through the same rooms as a run: rollout, advantage, trainer, publication."""

    def __init__(self, rows: list[list[dict[str, Any]]]) -> None:
        from treadle.api import load_model, policy_of, renderer_of
        from treadle.config import LearnConfig, LoraConfig, ModelConfig, RolloutConfig, RunConfig
        from treadle.sampler.engine import Engine
        from treadle.train import Trainer

        self._rows = rows
        self.config = RunConfig(
            model=ModelConfig(
                name="smollm2-135m", lora=LoraConfig(rank=8, alpha=16), max_context=256
            ),
            rollout=RolloutConfig(
                group_size=GROUP, groups_per_step=PROMPTS, max_new_tokens=MAX_NEW
            ),
            learn=LearnConfig(lr=3e-4, advantage="grpo", zero_variance="keep"),
        )
        loaded = load_model(self.config.model)
        self.renderer = renderer_of(loaded)
        self.policy = policy_of(loaded, self.config)
        self.engine = Engine(self.policy, max_rows=PROMPTS * GROUP).start()
        self._trainer_class = Trainer
        self._first = {n: p.detach().clone() for n, p in self.policy.parameters().items()}
        self._version = 0
        self._heap = machine.Heap()

    def step(self, index: int, *, skipping: bool = False) -> dict[str, Any]:
        """One timed step, then back to step-0 weights; `skipping` groups of equal rewards."""
        import torch

        trainer = self._trainer_class(self.policy, self.config.learn)
        result: dict[str, Any] = {}

        def whole() -> None:
            result["generation_s"], groups = timed(lambda: asyncio.run(self._rollout(index)))
            self._learn(trainer, groups, result, skipping)

        result["step_s"], _ = timed(whole)
        with torch.no_grad():
            for name, parameter in self.policy.parameters().items():
                parameter.copy_(self._first[name])
        self.policy.refresh()
        self._version += 1
        self.engine.publish(self._version)
        return result

    async def _rollout(self, index: int) -> list[Any]:
        import re

        from treadle.harness import single_turn
        from treadle.rollout import run_group
        from treadle.tools import Tools
        from treadle.types import Message, Reward, Task

        async def grade(trajectory: Any) -> Reward:
            numbers = re.findall(r"-?\d+", trajectory.answer.replace(",", ""))
            right = bool(numbers) and numbers[-1] == trajectory.task.data["answer"]
            return Reward(value=float(right))

        def task(i: int, row: dict[str, Any]) -> Task:
            return Task(
                id=str(i),
                taskset="sums",
                messages=tuple(Message(**m) for m in row["messages"]),
                data={"answer": row["answer"]},
            )

        return await asyncio.gather(
            *(
                run_group(
                    task(i, row),
                    index * PROMPTS + i,
                    GROUP,
                    sampler=self.engine,
                    renderer=self.renderer,
                    harness=single_turn,
                    tools=Tools(),
                    config=self.config.rollout,
                    max_context=self.policy.shape.max_context,
                    seed=0,
                    grade=grade,
                )
                for i, row in enumerate(self._rows[index])
            )
        )

    def _learn(
        self, trainer: Any, groups: list[Any], result: dict[str, Any], skipping: bool
    ) -> None:
        from treadle.advantage import advantages, zero_variance
        from treadle.batch import samples

        trained = [g for g in groups if not (skipping and zero_variance(g))] or groups
        rows = samples(trained, advantages(trained, self.config.learn.advantage))
        result["training_s"], step = timed(
            lambda: trainer.step(rows, step=0, version=self._version, guard=True)
        )
        assert not step.skipped, step.reason
        self._version += 1
        result["publish_s"], _ = timed(lambda: self.engine.publish(self._version))
        self._heap.release()  # as a run does after every step
        trajectories = [t for g in groups for t in g.trajectories]
        result["reward"] = sum(t.reward.value or 0.0 for t in trajectories) / len(trajectories)
        tokens = sum(t.num_sampled_tokens for t in trajectories)
        result["mean_tokens"] = tokens / len(trajectories)
        result["zero_variance_groups"] = sum(
            len({t.reward.value for t in g.trajectories}) == 1 for g in groups
        )
        result["parity_mean_abs_nats"] = step.metrics["parity/mean_abs_nats"]

    def close(self) -> None:
        self.engine.close()


def sweep(model: Path) -> None:
    """Each setting of the peer by one warm step on the same prompts."""
    seconds: dict[str, dict[str, Any]] = {}
    for micro, cache in SWEEP:
        peer = Trl(model, prompts(2, 0), TUNING.threads, micro, cache)
        try:
            peer.step()
            name = f"micro {micro}, {cache or 'dynamic'} cache"
            seconds[name] = peer.step()
        finally:
            peer.close()
        say(f"{name}: {seconds[name]['step_s']:.1f} s")
    best = min(row["step_s"] for row in seconds.values())
    finish(
        "step_vs_trl_sweep",
        {"step_vs_trl_sweep.best_s": best},
        {"tuning": TUNING.applied, "settings": seconds},
        versions=dict(p.split("==") for p in PEER),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4, help="interleaved steps, first is warm-up")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sweep", action="store_true", help="the peer's settings, nothing else")
    parser.add_argument("--json", action="store_true", help="only the document on stdout")
    args = parser.parse_args()

    from treadle.models.pull import pull

    model = pull("smollm2-135m")
    if args.sweep:
        sweep(model)
        return 0
    rows = prompts(args.steps + 1, args.seed)
    ours = Treadle(rows)
    peer = Trl(model, rows, TUNING.threads)
    pairs: list[dict[str, Any]] = []
    try:
        for index in range(args.steps + 1):
            pair: dict[str, Any] = {"load": os.getloadavg()[0]}
            for side in ("treadle", "trl") if index % 2 else ("trl", "treadle"):
                pair[side] = ours.step(index) if side == "treadle" else peer.step()
            pair["treadle_skipping"] = ours.step(index, skipping=True)
            say(
                f"{'warm-up' if index == 0 else f'step {index}'}: treadle "
                f"{pair['treadle']['step_s']:.2f} s, trl {pair['trl']['step_s']:.2f} s"
            )
            pairs.append(pair)
    finally:
        peer.close()
        ours.close()
    kept = pairs[1:]
    treadle_s = median([p["treadle"]["step_s"] for p in kept])
    trl_s = median([p["trl"]["step_s"] for p in kept])
    finish(
        "step_vs_trl",
        {
            "step_vs_trl.speedup": trl_s / treadle_s,
            "step_vs_trl.peak_gib": machine.peak_rss_bytes() / 2**30,
            "step_vs_trl.treadle_s": treadle_s,
            "step_vs_trl.trl_s": trl_s,
            "step_vs_trl.treadle_skipping_s": median(
                [p["treadle_skipping"]["step_s"] for p in kept]
            ),
        },
        {"tuning": TUNING.applied, "warm_up": pairs[0], "steps": kept},
        versions=dict(p.split("==") for p in PEER),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
