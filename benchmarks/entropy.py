"""What held entropy is worth when the task changes: GRPO, REPO-R and a bonus, in two phases.

    python -m benchmarks.entropy --json                          # tiny model, seed 0: 3 rows again
    python -m benchmarks.entropy --full --json                   # tiny: every row that is missing
    python -m benchmarks.entropy --model smollm2 --full --json   # SmolLM2-135M with LoRA

Phase 1 asks for a number in a range, and any number in it is right: many answers are. Phase 2 asks
the same questions and pays for multiples of 7 alone, which the question does not say: what is right
must be found among what the policy still tries. Only phase 1 differs between the arms: `grpo` is
the preset alone, `repo_r` and `bonus` are it with a controller and the same target, a fixed number
of nats per token. Phase 2 is plain GRPO for all, from the model that phase 1 left, so that its
start is what differs. In training a tenth of the verdicts is flipped, as noisy graders do; held-out
rates are without flips. Groups of equal rewards are kept, so all arms see the same prompts.

The tiny model (0.33 million parameters, all trained) is made in seconds: random, then supervised on
numbers drawn evenly from the ranges, after which six in ten of its own are right.

CPU budget: tiny 120 + 80 steps x 64 short answers, about two minutes a row on one core, 9 rows.
SmolLM2 70 + 40 steps x 64 answers of at most 6 tokens, about 3 minutes a row on two cores, 9 rows.

Rows are appended to results/entropy.jsonl, one per (setting, arm, seed, commit).

Figures, by model, means over the latest row of each seed:
- entropy.MODEL.ARM.held_error: |H - H*| / H*, of the mean entropy of the last 20 steps of phase 1;
- entropy.MODEL.ARM.entropy_nats: that entropy; .entropy_start_nats: of the first step;
- entropy.MODEL.ARM.first, .second: held-out rate at the end of phase 1 and of phase 2;
- entropy.MODEL.ARM.second_area: mean held-out rate over phase 2 (trapezoids over steps);
- entropy.MODEL.seeds: seeds with rows of all arms.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from statistics import fmean
from typing import Any

from treadle import machine

machine.tune()

from benchmarks.common import add_row, commit, finish, in_processes, rows, say

NAME = "entropy"
SEEDS = (0, 1, 2)
ARMS = ("grpo", "repo_r", "bonus")
QUESTIONS, HELD_OUT = 3000, 100
FLIPPED = 0.1
DIVISOR = 7
LAST = 20
"""Steps at the end of phase 1 whose mean entropy counts as held."""


@dataclass(frozen=True)
class Setup:
    """One of the two models, and what is run on it."""

    model: str
    """"" = made here."""
    question: str
    system: str
    steps: tuple[int, int]
    """Of phase 1 and 2."""
    every: int
    """Steps between held-out evaluations."""
    bounds: tuple[float, float]
    """Of |zeta|: replies of a few tokens need more than a long answer's, whose tails are longer.
    The smallest lets the controller change sides within ten steps."""
    target: tuple[tuple[int, float], ...]
    """H* in nats per token by step: from about what the model starts with to what is held. A fixed
    target below the start would first drive the policy to it."""
    settings: tuple[str, ...]
    workers: int
    """Rows at once; each has its share of the cores."""


SETUPS = {
    "tiny": Setup(
        model="",
        question="{low} to {high}",
        system="",
        steps=(120, 80),
        every=20,
        bounds=(0.01, 0.5),
        target=((0, 1.1), (30, 0.8)),
        settings=(
            "model.lora=null",
            "model.dtype=float32",
            "model.max_context=64",
            "rollout.max_new_tokens=4",
            "learn.lr=3e-4",
        ),
        workers=len(os.sched_getaffinity(0)),
    ),
    "smollm2": Setup(
        model="smollm2-135m",
        question="Pick a number between {low} and {high}.",
        system="Reply with a number.",
        steps=(70, 40),
        every=10,
        bounds=(0.005, 0.1),
        target=((10, 2.5), (40, 1.0)),
        settings=(
            "model.lora.rank=8",
            "model.lora.alpha=16",
            "model.max_context=128",
            "rollout.max_new_tokens=6",
            "learn.lr=2e-4",
        ),
        workers=1,
    ),
}


def questions(setup: Setup) -> list[dict[str, Any]]:
    """Ranges of two-digit numbers, 9 to 30 wide: a multiple of 7 is within each. The first are held
    out."""
    ranges = [(a, a + w) for a in range(10, 91) for w in range(9, 31) if a + w <= 99]
    random.Random(0).shuffle(ranges)
    return [
        {
            "prompt": setup.question.format(low=low, high=high),
            "low": low,
            "high": high,
            "split": "val" if i < HELD_OUT else "train",
        }
        for i, (low, high) in enumerate(ranges[:QUESTIONS])
    ]


def said(trajectory: Any) -> int | None:
    """The first number in the answer."""
    found = re.search(r"\d+", trajectory.answer)
    return int(found[0][:6]) if found else None


def in_range(trajectory: Any) -> float:
    """Phase 1: any number within the range, but not its ends: a reply that repeats the question
    would be right."""
    number, data = said(trajectory), trajectory.task.data
    return float(number is not None and data["low"] < number < data["high"])


def multiple(trajectory: Any) -> float:
    """Phase 2: a multiple of 7 in the range."""
    number = said(trajectory)
    return in_range(trajectory) if number is not None and number % DIVISOR == 0 else 0.0


PAYS = {"in_range": in_range, "multiple": multiple}


def noisy(pays: str) -> Any:
    """The reward with a tenth of its verdicts flipped, each by a hash of what was rolled out."""

    def reward(trajectory: Any) -> float:
        draw = blake2b(trajectory.id.encode(), digest_size=4).digest()
        flip = int.from_bytes(draw) < FLIPPED * 2**32
        return PAYS[pays](trajectory) if not flip else 1.0 - PAYS[pays](trajectory)

    return reward


def arm_settings(arm: str, setup: Setup) -> list[str]:
    own = {
        "grpo": [],
        "repo_r": [f"bounds={json.dumps(setup.bounds)}", f"strength={setup.bounds[0]}"],
        "bonus": ["bounds=[0, 1]", "rate=0.005"],
    }[arm]
    both = [f"method={arm}", f"target={json.dumps(setup.target)}"]
    return [f"learn.entropy.{one}" for one in [*both, *own]] if own else []


def settings(setup: Setup, seed: int, steps: int) -> list[str]:
    return [
        f"seed={seed}",
        f"steps={steps}",
        *setup.settings,
        "rollout.group_size=8",
        "rollout.groups_per_step=8",
        "learn.algorithm=grpo",
        "learn.warmup_steps=3",
        "learn.zero_variance=keep",
        f"eval.questions={HELD_OUT}",
        "eval.samples=4",
        f"eval.every={setup.every}",
        "store.checkpoint_every=1000",
    ]


def setting(setup: Setup) -> str:
    arms = [arm_settings(arm, setup) for arm in ARMS]
    start = [setup.model, setup.system] if setup.model else SUPERVISED
    what = [settings(setup, 0, 0), setup.steps, arms, questions(setup), FLIPPED, DIVISOR, start]
    return blake2b(json.dumps(what).encode(), digest_size=6).hexdigest()


def base(directory: Path) -> None:
    """The tiny model that every run starts from; a function of nothing."""
    import torch

    from treadle.models import tiny
    from treadle.models.load import load
    from treadle.models.lora import save_merged
    from treadle.models.policy import Policy
    from treadle.train.pretrain import demonstrate
    from treadle.train.sft import sft_steps

    torch.set_num_threads(1)
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as start:
        tiny.build_random(Path(start), layers=3, hidden=96, intermediate=256, seed=0)
        loaded = load(start, max_context=64)
        policy = Policy(loaded, lora=None, dtype=torch.float32)
        shown = [
            demonstrate(loaded, row["prompt"], str(rng.randint(row["low"] + 1, row["high"] - 1)))
            for row in questions(SETUPS["tiny"])
            if row["split"] == "train"
            for _ in range(4)
        ]
        rng.shuffle(shown)
        steps = sft_steps(policy, shown, batch_tokens=1024, lr=3e-3, warmup_steps=20)
        for _ in itertools.islice(steps, SUPERVISED):
            pass
        save_merged(policy, directory)


SUPERVISED = 80
"""Steps of the tiny model's supervision."""


def train(
    setup: Setup, model: str, pays: str, chosen: Sequence[str], run_dir: Path
) -> tuple[dict[int, float], list[float]]:
    """Held-out rates by step, and the entropy of every step in nats."""
    import treadle as td
    from treadle.evals.held_out import scores_of
    from treadle.store import Store

    tasks = run_dir.parent / f"{run_dir.name}.jsonl"
    tasks.write_text("".join(json.dumps(row) + "\n" for row in questions(setup)))
    td.train(
        model=model,
        tasks=td.TasksConfig(
            source=f"jsonl:{tasks}", system=setup.system, reward=f"benchmarks.entropy:{pays}"
        ),
        reward=noisy(pays),
        run_dir=run_dir,
        settings=chosen,
        progress=False,
    )
    curve: dict[int, float] = {}
    with Store.open(run_dir, readonly=True) as store:
        for row in store.evals(finished=True):
            of = scores_of(row)["reward"].values()
            curve[row.step] = fmean(fmean(s or 0.0 for s in scores) for scores in of)
        entropies = [s.metrics["policy/entropy_nats"] for s in store.steps() if s.metrics]
    return curve, entropies


def measure(name: str, model: str, arm: str, seed: int) -> dict[str, Any]:
    """A row: both phases of one arm."""
    import torch

    from treadle.weights.export import export_run

    setup = SETUPS[name]
    if setup.workers > 1:
        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        one, two = Path(scratch) / "one", Path(scratch) / "two"
        own = arm_settings(arm, setup)
        first, entropies = train(
            setup, model, "in_range", [*settings(setup, seed, setup.steps[0]), *own], one
        )
        left = Path(scratch) / "left"
        export_run(one, left, form="merged")
        # Other prompts first than in phase 1.
        later = settings(setup, seed + 100, setup.steps[1])
        second, after = train(setup, str(left), "multiple", later, two)
    held = fmean(entropies[-LAST:])
    return {
        "setting": setting(setup),
        "model": name,
        "arm": arm,
        "seed": seed,
        "commit": commit(),
        "target_nats": setup.target[-1][1],
        "entropy_start_nats": round(entropies[0], 4),
        "entropy_nats": round(held, 4),
        "entropies": [round(x, 3) for x in [*entropies, *after]],
        "first": {str(step): round(rate, 4) for step, rate in sorted(first.items())},
        "second": {str(step): round(rate, 4) for step, rate in sorted(second.items())},
        "second_area": area(second),
    }


def area(curve: Mapping[int, float]) -> float:
    steps = sorted(curve)
    total = sum((b - a) * (curve[a] + curve[b]) / 2 for a, b in itertools.pairwise(steps))
    return total / (steps[-1] - steps[0])


def figures_of(name: str) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Of the present setting of one model; empty where it has no rows."""
    now = setting(SETUPS[name])
    latest = {(row["arm"], row["seed"]): row for row in rows(NAME) if row["setting"] == now}
    if not latest:
        return {}, []
    whole = [s for s in SEEDS if all((arm, s) in latest for arm in ARMS)]
    out: dict[str, float] = {f"{NAME}.{name}.seeds": len(whole)}
    for arm in ARMS:
        of = [row for (a, _), row in latest.items() if a == arm]
        if of:
            values = {
                "held_error": fmean(abs(r["entropy_nats"] / r["target_nats"] - 1) for r in of),
                "entropy_nats": fmean(r["entropy_nats"] for r in of),
                "entropy_start_nats": fmean(r["entropy_start_nats"] for r in of),
                "first": fmean(list(r["first"].values())[-1] for r in of),
                "second": fmean(list(r["second"].values())[-1] for r in of),
                "second_area": fmean(r["second_area"] for r in of),
            }
            out |= {f"{NAME}.{name}.{arm}.{key}": value for key, value in values.items()}
    return out, [latest[key] for key in sorted(latest)]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=sorted(SETUPS), default="tiny")
    parser.add_argument("--full", action="store_true", help="every row that is missing")
    parser.add_argument("--json", action="store_true", help="only the document on stdout")
    args = parser.parse_args()

    setup = SETUPS[args.model]
    now = setting(setup)
    have = {(row["arm"], row["seed"]) for row in rows(NAME) if row["setting"] == now}
    everything = [(arm, seed) for seed in SEEDS for arm in ARMS]
    wanted = (
        [one for one in everything if one not in have]
        if args.full
        else [one for one in everything if one[1] == SEEDS[0]]
    )
    with tempfile.TemporaryDirectory() as made:
        if not setup.model and wanted:
            list(in_processes(base, [Path(made)], workers=1))
        what = [(args.model, setup.model or made, *one) for one in wanted]
        for row in in_processes(_measured, what, workers=setup.workers):
            add_row(NAME, row)
            last = {key: list(row[key].values())[-1] for key in ("first", "second")}
            say(
                f"{row['arm']:>7} seed {row['seed']}: entropy {row['entropy_start_nats']:.2f} -> "
                f"{row['entropy_nats']:.2f} (target {row['target_nats']:g}), phase 1 "
                f"{last['first']:.2f}, phase 2 {last['second']:.2f}, area {row['second_area']:.2f}"
            )
    figures: dict[str, float] = {}
    table: list[dict[str, Any]] = []
    for name in SETUPS:
        found, of = figures_of(name)
        figures |= found
        table += of
    finish(NAME, figures, {"rows": table})
    return 0


def _measured(what: tuple[str, str, str, int]) -> dict[str, Any]:
    return measure(*what)


if __name__ == "__main__":
    sys.exit(main())
