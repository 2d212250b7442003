"""Two task sets in one LoRA against one LoRA each: what interleaving costs.

    python -m benchmarks.multitask --json                     # tiny, rank 1, seed 0 again: 3 runs
    python -m benchmarks.multitask --full --json              # tiny: every row that is missing
    python -m benchmarks.multitask --model smollm2 --json     # SmolLM2-135M, rank 8, once

CPU budget: a run of 60 steps of 8 x 8 rollouts of tiny-pretrained takes about 25 s on two free
cores. A row is three runs (one family alone, the other alone, both), so a row takes about 80 s and
all six (ranks 1 and 8, seeds 0, 1, 2) about 8 minutes. SmolLM2: 120 steps of 128 rollouts in all,
about 12 minutes.

The tiny model has additions and reversals, those of `treadle.train.pretrain`; 50 and 80 questions
are held out. SmolLM2 has chain_sum and gcd of reasoning-gym, 80 each. The joint run makes twice the
steps of a separate one, so that each set has as many groups in both: the comparison is of one
adapter with two of the same rank, at equal data. Accuracy is the strict score of 4 samples of each
held-out question at temperature 1, after training.

Rows are appended to results/multitask.jsonl, one per (setting, seed, commit), rank in the setting.

Figures, per model and rank over the latest row of each seed:
- multitask.MODEL.gap_points.rank_R: separate minus joint accuracy in points of 100, mean over the
  seeds, of the worse set; 2 or less is what interleaving without forgetting means here. The worse
  set is chosen after the mean: chosen in each seed, noise alone would make a gap;
- multitask.MODEL.gap_error_points.rank_R: standard error of that mean, from the spread over seeds;
- multitask.MODEL.joint.rank_R, .separate.rank_R: mean accuracy over both sets and the seeds;
- multitask.MODEL.before: the same before any training;
- multitask.MODEL.seeds: seeds that have a row at every rank.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.common import add_row, commit, finish, rows, say
from benchmarks.recipe_gain import chosen
from treadle.config import (
    EvalConfig,
    LearnConfig,
    LoraConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    StoreConfig,
    TasksConfig,
    to_dict,
)

NAME = "multitask"
SEEDS = (0, 1, 2)
RANKS = {"tiny": (1, 8), "smollm2": (8,)}
FAMILIES = {"tiny": ("additions", "reversals"), "smollm2": ("chain_sum", "gcd")}
STEPS = {"tiny": 60, "smollm2": 30}
"""Of a separate run; the joint one has twice as many."""

SYSTEM = "You are a calculator. Reply with the answer only."
OPTIONS = {
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
    "gcd": {"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 30},
}


def write_tasks(folder: Path) -> dict[str, Path]:
    """All 100 additions, and 400 of the reversals, as JSONL files.

    Half of the additions and a fifth of the reversals are held out, the same in every run.
    """
    from treadle.train.pretrain import problem

    names = FAMILIES["tiny"]
    found: dict[str, dict[str, str]] = {name: {} for name in names}
    index = 0
    while len(found["additions"]) < 100 or len(found["reversals"]) < 400:
        question, answer = problem(index, seed=1)
        of = found[names[index % 2]]
        if len(of) < 400:
            of[question] = answer
        index += 1
    paths = {name: folder / f"{name}.jsonl" for name in names}
    for name, path in paths.items():
        pairs = sorted(found[name].items())
        random.Random(name).shuffle(pairs)
        held_out = len(pairs) // (2 if name == "additions" else 5)
        rows = (
            {"prompt": q, "answer": a, "split": "val" if i < held_out else "train"}
            for i, (q, a) in enumerate(pairs)
        )
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return paths


def config(
    model: str, paths: dict[str, Path], names: tuple[str, ...], rank: int, seed: int
) -> RunConfig:
    steps = STEPS[model] * len(names)
    both = RunConfig(
        name=NAME,
        steps=steps,
        seed=seed,
        rollout=RolloutConfig(group_size=8, groups_per_step=8, max_new_tokens=8),
        eval=EvalConfig(questions=80, samples=4, split="val"),
        store=StoreConfig(checkpoint_every=steps),
    )
    lora = LoraConfig(rank=rank, alpha=2.0 * rank)
    if model == "tiny":
        return replace(
            both,
            model=ModelConfig(name="tiny-pretrained", dtype="float32", max_context=128, lora=lora),
            tasks=tuple(TasksConfig(source=f"jsonl:{paths[name]}") for name in names),
            learn=LearnConfig(lr=3e-3),
        )
    return replace(
        both,
        model=ModelConfig(name="smollm2-135m", max_context=256, lora=lora),
        tasks=tuple(
            TasksConfig(
                source=f"reasoning_gym:{name}",
                options=dict(OPTIONS[name]),
                system=SYSTEM,
                reward="treadle.reward.builtin:shaped",
            )
            for name in names
        ),
        rollout=RolloutConfig(group_size=16, groups_per_step=8, max_new_tokens=12),
        learn=LearnConfig(advantage="grpo", lr=2e-4, warmup_steps=3),
    )


def setting(model: str, rank: int) -> str:
    names = {name: Path(f"{name}.jsonl") for name in FAMILIES[model]}
    tree = to_dict(config(model, names, FAMILIES[model], rank, 0))
    tree["tasks"] = [chosen(tasks, to_dict(TasksConfig())) for tasks in tree["tasks"]]
    # Options of later code, left at their defaults, are not part of it.
    found = chosen(tree, to_dict(RunConfig()))
    return blake2b(json.dumps(found, sort_keys=True).encode(), digest_size=6).hexdigest()


def accuracy(run: Path, names: tuple[str, ...], step: int) -> dict[str, float]:
    """Strict held-out accuracy of each family after a step."""
    from treadle.store import Store

    with Store.open(run, readonly=True) as store:
        rows = [row for row in store.evals(finished=True) if row.step == step]
    out = {}
    for row in rows:
        (name,) = [n for n in names if n in row.taskset]
        out[name] = fmean(0.0 if r.score is None else r.score for r in row.results)
    assert set(out) == set(names), f"{run} has no evaluation of all of {names}"
    return out


def measure(model: str, rank: int, seed: int) -> dict[str, Any]:
    from treadle.api import run_config

    names, started = FAMILIES[model], time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        paths = write_tasks(Path(scratch)) if model == "tiny" else {}
        separate: dict[str, float] = {}
        before: dict[str, float] = {}
        for name in names:
            wanted = config(model, paths, (name,), rank, seed)
            run_config(wanted, Path(scratch) / name)
            separate |= accuracy(Path(scratch) / name, (name,), wanted.steps)
            before |= accuracy(Path(scratch) / name, (name,), 0)
        wanted = config(model, paths, names, rank, seed)
        run_config(wanted, Path(scratch) / "joint")
        joint = accuracy(Path(scratch) / "joint", names, wanted.steps)
    return {
        "setting": setting(model, rank),
        "model": model,
        "rank": rank,
        "seed": seed,
        "commit": commit(),
        "seconds": round(time.perf_counter() - started, 1),
        "before": before,
        "separate": separate,
        "joint": joint,
    }


def gap(of: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Separate minus joint of the worse set in points, and its standard error over the seeds."""
    gaps = {n: [100 * (row["separate"][n] - row["joint"][n]) for row in of] for n in of[0]["joint"]}
    worst = max(gaps.values(), key=fmean)
    return fmean(worst), stdev(worst) / len(worst) ** 0.5 if len(worst) > 1 else float("nan")


def figures_of(model: str) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Of the present setting of one model; empty where it has no rows."""
    now = {setting(model, rank) for rank in RANKS[model]}
    latest = {(row["rank"], row["seed"]): row for row in rows(NAME) if row["setting"] in now}
    table = [latest[key] for key in sorted(latest)]
    if not table:
        return {}, []
    whole = [s for s in SEEDS if all((rank, s) in latest for rank in RANKS[model])]
    key = f"{NAME}.{model}"
    figures: dict[str, float] = {
        f"{key}.seeds": len(whole),
        f"{key}.before": fmean(fmean(row["before"].values()) for row in table),
    }
    for rank in RANKS[model]:
        of = [row for row in table if row["rank"] == rank]
        if of:
            points, error = gap(of)
            figures[f"{key}.gap_points.rank_{rank}"] = points
            if len(of) > 1:
                figures[f"{key}.gap_error_points.rank_{rank}"] = error
            for side in ("separate", "joint"):
                mean = fmean(fmean(row[side].values()) for row in of)
                figures[f"{key}.{side}.rank_{rank}"] = mean
    return figures, table


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=sorted(RANKS), default="tiny")
    parser.add_argument("--full", action="store_true", help="every rank and seed without a row")
    parser.add_argument("--json", action="store_true", help="only the document on stdout")
    args = parser.parse_args()

    model: str = args.model
    now = {setting(model, rank) for rank in RANKS[model]}
    have = {(row["rank"], row["seed"]) for row in rows(NAME) if row["setting"] in now}
    wanted = [(rank, seed) for seed in SEEDS for rank in RANKS[model]]
    for rank, seed in [w for w in wanted if w not in have] if args.full else wanted[:1]:
        say(f"{model}, rank {rank}, seed {seed}: minutes")
        row = measure(model, rank, seed)
        add_row(NAME, row)
        say(f"  separate {row['separate']}, joint {row['joint']}")
    figures: dict[str, float] = {}
    table: list[dict[str, Any]] = []
    for each in RANKS:
        found, of = figures_of(each)
        figures |= found
        table += of
    finish(NAME, figures, {"rows": table})
    return 0


if __name__ == "__main__":
    sys.exit(main())
