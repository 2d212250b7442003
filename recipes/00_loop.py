"""The whole path in one file: a tiny model learns to add, on a CPU, in under a minute.

    python recipes/00_loop.py

    task -> render -> sample -> judge -> advantage -> samples -> loss -> step -> publish

No controller, no ledger, no command line: this is the loop that `treadle train` runs, with
everything that makes it safe taken away so that it can be read. Each stage calls the room that
does the real work; `treadle/loop.py` is the version that never loses anything.

Takes: nothing. Gives: the strict rate on held-out sums before and after.
"""

from __future__ import annotations

import asyncio
import random
import sys

from treadle import machine

machine.tune()  # before torch: thread wake-up and malloc are fixed when it loads

import torch

from treadle.advantage import advantages, zero_variance
from treadle.batch import pack, samples
from treadle.config import LoraConfig, RolloutConfig
from treadle.harness import single_turn
from treadle.losses import cispo_loss
from treadle.models.load import load
from treadle.models.policy import Policy
from treadle.render import Renderer
from treadle.rollout import run_group
from treadle.sampler.engine import Engine
from treadle.tools import Tools
from treadle.train.forward import forward
from treadle.train.pretrain import install_tiny_pretrained
from treadle.types import Group, Message, Reward, Sample, Task, Trajectory

STEPS = 25
GROUPS_PER_STEP, GROUP_SIZE = 8, 8
LEARNING_RATE = 2e-3
SEED = 0


# --- 1. Tasks: what the model is shown, and what the grader knows. ---------------------------


def sums() -> tuple[list[Task], list[Task]]:
    """All sums of two digits, a fifth of them held out: training never sees those texts."""
    tasks = [
        Task(
            id=f"{a}+{b}",
            taskset="sums",
            messages=(Message(role="user", content=f"{a}+{b}"),),
            data={"answer": str(a + b)},
        )
        for a in range(10)
        for b in range(10)
    ]
    random.Random(SEED).shuffle(tasks)
    return tasks[20:], tasks[:20]


# --- 2. Reward: a function of the trajectory. Here in this process; a run uses a worker. ------


async def strict(trajectory: Trajectory) -> Reward:
    answer = str(trajectory.task.data["answer"])
    return Reward(value=float(trajectory.answer.strip() == answer))


# --- 3. Sampling: a group of trajectories per task, all at once, sharing their prompt. --------


async def sample(
    engine: Engine, renderer: Renderer, tasks: list[Task], first_ordinal: int
) -> list[Group]:
    """One group per task. Every sampled token comes back with its id, logprob and version."""
    config = RolloutConfig(group_size=GROUP_SIZE, max_new_tokens=6)
    return await asyncio.gather(
        *(
            run_group(
                task,
                first_ordinal + i,
                GROUP_SIZE,
                sampler=engine,
                renderer=renderer,
                harness=single_turn,
                tools=Tools(),
                config=config,
                max_context=64,
                seed=SEED,
                grade=strict,
            )
            for i, task in enumerate(tasks)
        )
    )


# --- 4. Learning: rewards to advantages to rows to a gradient. --------------------------------


def rows_of(groups: list[Group]) -> list[Sample]:
    """Trainable rows of the groups that can teach: where all rewards are equal, nothing can."""
    informative = [group for group in groups if not zero_variance(group)]
    return samples(informative, advantages(informative, "group_mean"))


def learn(policy: Policy, optimiser: torch.optim.Optimizer, rows: list[Sample]) -> float:
    """One optimiser step; returns its loss.

    A token weighs 1 / (trained tokens of the whole step), decided before anything is packed, so the
    gradient does not depend on how rows fall into micro-batches.
    """
    micros = pack(rows, micro_tokens=2048)
    optimiser.zero_grad()
    total = 0.0
    for micro in micros:
        result = cispo_loss(forward(policy, micro))
        result.loss.backward()
        total += result.loss.item()
    torch.nn.utils.clip_grad_norm_(policy.parameters().values(), 1.0)
    optimiser.step()
    policy.refresh()  # the compute copies follow the parameters
    return total


# --- 5. The loop. ------------------------------------------------------------------------------


def strict_rate(groups: list[Group]) -> float:
    values = [t.reward.value for g in groups for t in g.trajectories if t.reward.value is not None]
    return sum(values) / len(values)


async def main() -> None:
    train, held_out = sums()
    loaded = load(str(install_tiny_pretrained()), max_context=64)
    renderer = Renderer(loaded.tokenizer, loaded.stop_ids)
    policy = Policy(loaded, lora=LoraConfig(rank=8, alpha=16), dtype=torch.float32, seed=SEED)
    optimiser = torch.optim.AdamW(
        policy.parameters().values(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0
    )
    draw = random.Random(SEED)
    async with Engine(policy, max_rows=GROUPS_PER_STEP * GROUP_SIZE) as engine:
        before = strict_rate(await sample(engine, renderer, held_out, 10_000))
        print(f"held-out strict rate before: {before:.2f}")
        for step in range(STEPS):
            tasks = draw.sample(train, GROUPS_PER_STEP)
            groups = await sample(engine, renderer, tasks, step * GROUPS_PER_STEP)
            rows = rows_of(groups)
            if not rows:
                print(f"step {step + 1:2d}  every group had equal rewards: nothing to learn")
                continue
            loss = learn(policy, optimiser, rows)
            engine.publish(step + 1)  # the sampler serves the new weights as the next version
            print(
                f"step {step + 1:2d}  reward {strict_rate(groups):.2f}  loss {loss:+.4f}  "
                f"rows {len(rows)}  oldest version {min(g.version for g in groups)}"
            )
        after = strict_rate(await sample(engine, renderer, held_out, 10_000))
        print(f"held-out strict rate after: {after:.2f}")
    if after <= before:
        sys.exit("nothing was learnt")


if __name__ == "__main__":
    asyncio.run(main())
