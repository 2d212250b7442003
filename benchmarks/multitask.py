"""Two task sets in one LoRA against one LoRA each: what interleaving costs.

    python -m benchmarks.multitask --json           # rank 1, seed 0 again: three runs
    python -m benchmarks.multitask --full --json    # every rank and seed that has no row yet

CPU budget: a run of 60 steps of 8 x 8 rollouts of tiny-pretrained takes about 25 s on two free
cores. A row is three runs (additions alone, reversals alone, both), so a row takes about 80 s and
all six (ranks 1 and 8, seeds 0, 1, 2) about 8 minutes.

Additions and reversals are those of `treadle.train.pretrain`; 50 and 80 questions are held out. The
joint run makes twice the steps of a separate one, so that each set has as many groups in both: the
comparison is of one adapter with two of the same rank, at equal data. Accuracy is the strict score
of 4 samples of each held-out question at temperature 1, after training.

Rows are appended to results/multitask.jsonl, one per (setting, seed, commit), rank in the setting.

Figures, per rank over the latest row of each seed:
- multitask.gap_points.rank_R: separate minus joint accuracy in points of 100, mean over the seeds,
  of the worse set; 2 or less is what interleaving without forgetting means here. The worse set is
  chosen after the mean: chosen in each seed, noise alone would make a gap;
- multitask.gap_error_points.rank_R: standard error of that mean, from the spread over the seeds;
- multitask.joint.rank_R, multitask.separate.rank_R: mean accuracy over both sets and the seeds;
- multitask.before: the same before any training;
- multitask.seeds: seeds that have a row at every rank.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from hashlib import blake2b
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.common import RESULTS, commit, finish, say
from benchmarks.recipe_gain import chosen

NAME = "multitask"
ROWS = RESULTS / f"{NAME}.jsonl"
RANKS = (1, 8)
SEEDS = (0, 1, 2)
STEPS = 60
"""Of a separate run; the joint one has twice as many."""

FAMILIES = ("additions", "reversals")


def write_tasks(folder: Path) -> dict[str, Path]:
    """All 100 additions, and 400 of the reversals, as JSONL files.

    Half of the additions and a fifth of the reversals are held out, the same in every run.
    """
    from treadle.train.pretrain import problem

    found: dict[str, dict[str, str]] = {name: {} for name in FAMILIES}
    index = 0
    while len(found["additions"]) < 100 or len(found["reversals"]) < 400:
        question, answer = problem(index, seed=1)
        of = found[FAMILIES[index % 2]]
        if len(of) < 400:
            of[question] = answer
        index += 1
    paths = {name: folder / f"{name}.jsonl" for name in FAMILIES}
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


def config(paths: dict[str, Path], names: tuple[str, ...], rank: int, seed: int) -> Any:
    from treadle.config import (
        EvalConfig,
        LearnConfig,
        LoraConfig,
        ModelConfig,
        RolloutConfig,
        RunConfig,
        StoreConfig,
        TasksConfig,
    )

    steps = STEPS * len(names)
    return RunConfig(
        name=NAME,
        steps=steps,
        seed=seed,
        model=ModelConfig(
            name="tiny-pretrained",
            dtype="float32",
            max_context=128,
            lora=LoraConfig(rank=rank, alpha=2.0 * rank),
        ),
        tasks=tuple(TasksConfig(source=f"jsonl:{paths[name]}") for name in names),
        rollout=RolloutConfig(group_size=8, groups_per_step=8, max_new_tokens=8),
        learn=LearnConfig(lr=3e-3),
        eval=EvalConfig(questions=80, samples=4, split="val"),
        store=StoreConfig(checkpoint_every=steps),
    )


def setting(rank: int) -> str:
    from treadle.config import RunConfig, TasksConfig, to_dict

    names = {name: Path(f"{name}.jsonl") for name in FAMILIES}
    tree = to_dict(config(names, FAMILIES, rank, 0))
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


def measure(rank: int, seed: int) -> dict[str, Any]:
    from treadle.api import run_config

    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        paths = write_tasks(Path(scratch))
        separate: dict[str, float] = {}
        before: dict[str, float] = {}
        for name in FAMILIES:
            wanted = config(paths, (name,), rank, seed)
            run_config(wanted, Path(scratch) / name)
            separate |= accuracy(Path(scratch) / name, (name,), wanted.steps)
            before |= accuracy(Path(scratch) / name, (name,), 0)
        wanted = config(paths, FAMILIES, rank, seed)
        run_config(wanted, Path(scratch) / "joint")
        joint = accuracy(Path(scratch) / "joint", FAMILIES, wanted.steps)
    return {
        "setting": setting(rank),
        "rank": rank,
        "seed": seed,
        "commit": commit(),
        "seconds": round(time.perf_counter() - started, 1),
        "before": before,
        "separate": separate,
        "joint": joint,
    }


def gap(of: list[dict[str, Any]]) -> tuple[float, float]:
    """Separate minus joint of the worse set in points, and its standard error over the seeds."""
    gaps = {n: [100 * (row["separate"][n] - row["joint"][n]) for row in of] for n in FAMILIES}
    worst = max(gaps.values(), key=fmean)
    return fmean(worst), stdev(worst) / len(worst) ** 0.5 if len(worst) > 1 else float("nan")


def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--full", action="store_true", help="every rank and seed without a row")
    parser.add_argument("--json", action="store_true", help="only the document on stdout")
    args = parser.parse_args()

    now = {setting(rank): rank for rank in RANKS}
    have = {(row["rank"], row["seed"]) for row in rows() if row["setting"] in now}
    wanted = [(rank, seed) for seed in SEEDS for rank in RANKS]
    for rank, seed in [w for w in wanted if w not in have] if args.full else wanted[:1]:
        say(f"rank {rank}, seed {seed}: a minute or two")
        row = measure(rank, seed)
        with ROWS.open("a") as file:
            file.write(json.dumps(row) + "\n")
        say(f"  separate {row['separate']}, joint {row['joint']}")
    latest = {(row["rank"], row["seed"]): row for row in rows() if row["setting"] in now}
    table = [latest[key] for key in sorted(latest)]
    whole = [s for s in SEEDS if all((rank, s) in latest for rank in RANKS)]
    figures: dict[str, float] = {
        "multitask.seeds": len(whole),
        "multitask.before": fmean(fmean(row["before"].values()) for row in table),
    }
    for rank in RANKS:
        of = [row for row in table if row["rank"] == rank]
        if of:
            points, error = gap(of)
            figures[f"multitask.gap_points.rank_{rank}"] = points
            if len(of) > 1:
                figures[f"multitask.gap_error_points.rank_{rank}"] = error
            for side in ("separate", "joint"):
                mean = fmean(fmean(row[side].values()) for row in of)
                figures[f"multitask.{side}.rank_{rank}"] = mean
    finish(NAME, figures, {"rows": table})
    return 0


if __name__ == "__main__":
    sys.exit(main())
