"""What each algorithm learns: every preset on two task families, from a warm start, on a CPU.

    python -m benchmarks.algorithms --json          # a sample: 3 algorithms, 1 seed (minutes)
    python -m benchmarks.algorithms --full --json   # every row that is missing

The model is made here in ten seconds: 0.33 million random parameters, then our own supervised
fine-tuning until it solves a third of two families that it has seen: four letters reversed, and
four letters sorted (about 1,900 questions each, 100 of them held out, which training never sees by
text). Every parameter is trained. Generation runs two steps ahead: at lag 0 with one update per
batch all losses have one gradient, and there is nothing to compare. Every algorithm has the same
prompts, seeds, steps, samples and learning rate, so that it is the algorithm that differs. One rate
for all is a choice: it is the default's, and others might do better at theirs.

CPU budget: 40 steps x 8 groups x 8 samples and 5 evaluations take about 20 seconds on one core;
29 presets and the control, 3 seeds and 2 families on 2 cores are about half an hour.

Rows are appended to results/algorithms.jsonl, one per (setting, algorithm, family, seed, commit);
`--full` skips what it has at any commit. The default run measures `cispo`, `grpo` and the wrong
sign again with seed 0 whether they have rows or not.

Figures, over the rows of the current setting, by algorithm and family:
- algorithms.ALGORITHM.FAMILY.final: mean over seeds of the last held-out strict rate;
- algorithms.ALGORITHM.FAMILY.area: mean over seeds of the area under the curve of held-out rates,
  as a mean rate (trapezoids over steps);
- algorithms.wrong_sign.FAMILY.final: the control, rewards negated: it must end below the start;
- algorithms.start.FAMILY: mean held-out rate before training.
`detail.table` has mean, least and largest of both by algorithm and family.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from statistics import fmean
from typing import Any

from treadle import machine

machine.tune()

from benchmarks.common import add_row, commit, finish, in_processes, rows, say

NAME = "algorithms"
SEEDS = (0, 1, 2)
FAMILIES = ("reverse", "sort")
LETTERS = {"reverse": 4, "sort": 4}
HELD_OUT = 100
START = 0.33
"""Success rate of the model before training, over both families."""
STEPS, EVERY = 40, 10
LR = 3e-4
WRONG = "wrong_sign"
"""The control: the default algorithm, paid for being wrong."""
SAMPLE = ("cispo", "grpo", WRONG)
OTHER = frozenset({"sft", "distill", "distill_reward"})
"""Presets that learn from demonstrations or a teacher: benchmarks/sft_rl_distill.py."""


OWN = {
    "gdpo": ['learn.reward_weights={"score": 1, "lenient": 0.5}'],
    "ppo": ["learn.critic={}"],
    # Where all are paid nothing, a run under the wrong sign would wait for a group that teaches.
    WRONG: ["learn.zero_variance=keep"],
}
"""What an algorithm needs beside its name."""


def base(directory: Path) -> None:
    """The model that every run starts from; a function of nothing."""
    import torch

    from treadle.models import tiny
    from treadle.models.load import load
    from treadle.models.lora import save_merged
    from treadle.models.policy import Policy
    from treadle.train.pretrain import demonstrate, success_rate
    from treadle.train.sft import sft_steps

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as start:
        tiny.build_random(Path(start), layers=3, hidden=96, intermediate=256, seed=0)
        loaded = load(start, max_context=64)
        policy = Policy(loaded, lora=None, dtype=torch.float32)
        shown = {
            split: [
                demonstrate(loaded, row["prompt"], row["answer"])
                for family in FAMILIES
                for row in questions(family)
                if row["split"] == split
            ]
            for split in ("train", "val")
        }
        steps = sft_steps(policy, shown["train"], batch_tokens=1024, lr=3e-3, warmup_steps=20)
        for step, _ in zip(range(500), steps, strict=False):
            if step % 10 == 9 and success_rate(policy, shown["val"]) >= START:
                break
        save_merged(policy, directory)


def names() -> list[str]:
    from treadle.algorithms import ALGORITHMS

    return [*(name for name in ALGORITHMS if name not in OTHER), WRONG]


def questions(family: str) -> list[dict[str, str]]:
    """Questions of a family with answers, the first HELD_OUT of them held out."""
    rng = random.Random(family)
    words = sorted({"".join(rng.choices("abcdefghij", k=LETTERS[family])) for _ in range(2000)})
    rng.shuffle(words)
    answer = {"reverse": lambda word: word[::-1], "sort": lambda word: "".join(sorted(word))}
    return [
        {
            "prompt": f"{family} {word}",
            "answer": answer[family](word),
            "split": "val" if i < HELD_OUT else "train",
        }
        for i, word in enumerate(words)
    ]


def wrong(trajectory: Any) -> float:
    """The reward of the control."""
    return -float(trajectory.answer.strip() == trajectory.task.data["answer"])


def settings(algorithm: str, seed: int) -> list[str]:
    """What a run is: `a.b=c` on top of the defaults."""
    return [
        f"seed={seed}",
        f"steps={STEPS}",
        "model.lora=null",
        "model.dtype=float32",
        "model.max_context=64",
        "rollout.group_size=8",
        "rollout.groups_per_step=8",
        "rollout.max_new_tokens=6",
        f"learn.algorithm={'cispo' if algorithm == WRONG else algorithm}",
        f"learn.lr={LR}",
        "learn.warmup_steps=3",
        "schedule.eta=2",
        "schedule.max_lag=4",
        "eval.questions=100",
        "eval.samples=8",
        f"eval.every={EVERY}",
        "store.checkpoint_every=1000",
        *OWN.get(algorithm, ()),
    ]


def setting() -> str:
    what = [settings("", 0), [questions(family) for family in FAMILIES], START]
    return blake2b(json.dumps(what).encode(), digest_size=6).hexdigest()


def measure(model: str, algorithm: str, family: str, seed: int) -> dict[str, Any]:
    """One run, and its held-out strict rates by step."""
    import torch

    import treadle as td
    from treadle.evals.held_out import scores_of
    from treadle.store import Store

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        tasks = Path(scratch) / f"{family}.jsonl"
        tasks.write_text("".join(json.dumps(row) + "\n" for row in questions(family)))
        run_dir = Path(scratch) / "run"
        td.train(
            model=model,
            tasks=f"jsonl:{tasks}",
            reward="benchmarks.algorithms:wrong" if algorithm == WRONG else "score",
            run_dir=run_dir,
            settings=settings(algorithm, seed),
            progress=False,
        )
        curve: dict[int, float] = {}
        with Store.open(run_dir, readonly=True) as store:
            for row in store.evals(finished=True):
                by_question = scores_of(row)["strict"].values()
                curve[row.step] = fmean(fmean(s or 0.0 for s in each) for each in by_question)
            # The latest step that trained: a control that is paid nothing skips its last ones.
            last = [s.metrics for s in store.steps() if "policy/entropy_nats" in s.metrics][-1]
    steps = sorted(curve)
    area = sum((b - a) * (curve[a] + curve[b]) / 2 for a, b in itertools.pairwise(steps))
    return {
        "setting": setting(),
        "algorithm": algorithm,
        "family": family,
        "seed": seed,
        "commit": commit(),
        "curve": {str(step): round(curve[step], 4) for step in steps},
        "start": curve[steps[0]],
        "final": curve[steps[-1]],
        "area": area / (steps[-1] - steps[0]),
        "entropy_nats": last["policy/entropy_nats"],
        "clipped_frac": last.get("loss/clipped_frac"),
    }


def table(found: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Mean, least and largest over the seeds, by algorithm and family."""
    out: dict[str, dict[str, Any]] = {}
    for algorithm in names():
        for family in FAMILIES:
            of = {
                row["seed"]: row
                for row in found
                if (row["algorithm"], row["family"]) == (algorithm, family)
            }
            if of:
                cell: dict[str, Any] = {"seeds": len(of)}
                for key in ("start", "final", "area"):
                    values = [row[key] for row in of.values()]
                    cell[key] = {
                        "mean": round(sum(values) / len(values), 4),
                        "range": [round(min(values), 4), round(max(values), 4)],
                    }
                out.setdefault(algorithm, {})[family] = cell
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--full", action="store_true", help="every row that is missing")
    parser.add_argument("--json", action="store_true", help="only the document on stdout")
    args = parser.parse_args()

    now = setting()
    have = {
        (row["algorithm"], row["family"], row["seed"])
        for row in rows(NAME)
        if row["setting"] == now
    }
    everything = [(a, f, s) for s in SEEDS for a in names() for f in FAMILIES]
    wanted = (
        [one for one in everything if one not in have]
        if args.full
        else [one for one in everything if one[0] in SAMPLE and one[2] == SEEDS[0]]
    )
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as model:
        if wanted:
            list(in_processes(base, [Path(model)], workers=1))
        what = [(model, *one) for one in wanted]
        for row in in_processes(_measured, what, workers=cores):
            add_row(NAME, row)
            say(
                f"{row['algorithm']:>22} {row['family']:>9} seed {row['seed']}: "
                f"{row['start']:.2f} -> {row['final']:.2f}, area {row['area']:.2f}, "
                f"entropy {row['entropy_nats']:.2f}"
            )
    found = table([row for row in rows(NAME) if row["setting"] == now])
    figures = {
        f"{NAME}.{algorithm}.{family}.{key}": cell[key]["mean"]
        for algorithm, families in found.items()
        for family, cell in families.items()
        for key in ("final", "area")
    }
    for family in FAMILIES:
        starts = [r["start"] for r in rows(NAME) if (r["setting"], r["family"]) == (now, family)]
        figures[f"{NAME}.start.{family}"] = sum(starts) / len(starts)
    finish(NAME, figures, {"table": found})
    return 0


def _measured(what: tuple[str, str, str, int]) -> dict[str, Any]:
    return measure(*what)


if __name__ == "__main__":
    sys.exit(main())
