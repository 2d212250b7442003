"""SFT, RL and on-policy distillation on one task family: what each reaches and what it costs.

    python -m benchmarks.sft_rl_distill --json           # measures seed 0 again
    python -m benchmarks.sft_rl_distill --full --json    # every seed that has no row yet

CPU budget: `tiny-pretrained` (0.1 M parameters), three runs of 60 steps and three drift reports a
seed: about 2 minutes of one core, 6 for all 3 seeds.

The family is reversing three letters. Learnt from 500 demonstrations (sft), from the strict score
(rl), or from the RL run of the same seed as teacher (distill). Held out are reversals that none
has seen; never touched are additions with a sum below 10, and those from 10 on. Questions are the
same for all settings and seeds; the seed moves the order, the draws and nothing else.

Rows are appended to results/sft_rl_distill.jsonl, one per (setting, seed, commit). Figures are
means over the latest row of each seed, per method:
- sft_rl_distill.seeds: seeds with rows of all three methods;
- sft_rl_distill.METHOD.after, .gain, .gain_low: strict rate on the held-out reversals, its paired
  gain, and the smallest gain among the seeds;
- sft_rl_distill.METHOD.kl_from_start: KL(start || end) on the trained family, nats per token;
- sft_rl_distill.METHOD.forgot: loss of strict rate over the two untouched sets, mean; > 0 is worse.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from hashlib import blake2b
from pathlib import Path
from typing import Any

from benchmarks.common import add_row, commit, finish, rows, say

NAME = "sft_rl_distill"
SEEDS = (0, 1, 2)
METHODS = ("sft", "rl", "distill")

STEPS, QUESTIONS, SAMPLES = 60, 100, 4
DEMONSTRATIONS = 500
RATES = {"sft": 1e-3, "rl": 1e-3, "distill": 3e-4}
"""Distillation has one sampled difference per token and no baseline: 1e-3 is too fast for it."""


def write_sources(folder: Path) -> None:
    """Files of the family and of the two untouched sets; nothing here depends on a seed."""
    from treadle.train.pretrain import problem

    words: dict[str, str] = {}
    for index in range(1, 4000, 2):
        question, answer = problem(index, seed=100)
        words.setdefault(question, answer)
    items = list(words.items())
    held, train = items[:QUESTIONS], items[QUESTIONS : QUESTIONS + DEMONSTRATIONS]

    def write(name: str, rows: list[dict[str, Any]]) -> None:
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    def task(question: str, answer: str, split: str) -> dict[str, Any]:
        return {"prompt": question, "answer": answer, "split": split}

    turns = [
        [{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in train
    ]
    write("chat.jsonl", [{"messages": each} for each in turns])
    write(
        "reverse.jsonl",
        [task(q, a, "val") for q, a in held] + [task(q, a, "train") for q, a in train],
    )
    sums = [(a, b) for a in range(10) for b in range(10)]
    for name, chosen in (
        ("small.jsonl", [(a, b) for a, b in sums if a + b < 10]),
        ("large.jsonl", [(a, b) for a, b in sums if a + b >= 10]),
    ):
        write(name, [task(f"{a}+{b}", str(a + b), "val") for a, b in chosen])


def settings() -> dict[str, Any]:
    return {
        "model": {"name": "tiny-pretrained", "lora": None, "max_context": 96, "dtype": "float32"},
        "steps": STEPS,
        "rollout": {"group_size": 8, "groups_per_step": 8, "max_new_tokens": 8},
        "eval": {"questions": QUESTIONS, "samples": SAMPLES},
        "store": {"checkpoint_every": STEPS},
        "methods": {
            "sft": {"algorithm": "sft", "lr": RATES["sft"]},
            "rl": {"algorithm": "cispo", "lr": RATES["rl"]},
            "distill": {"algorithm": "distill", "lr": RATES["distill"]},
        },
        "demonstrations": DEMONSTRATIONS,
    }


def setting() -> str:
    return blake2b(json.dumps(settings(), sort_keys=True).encode(), digest_size=6).hexdigest()


def train(method: str, seed: int, folder: Path) -> float:
    """Train in `folder`/METHOD; seconds."""
    from treadle.api import run_config
    from treadle.config import from_dict

    chosen = settings()
    learn = dict(chosen["methods"][method])
    family: list[dict[str, Any]] = [{"source": f"jsonl:{folder / 'reverse.jsonl'}"}]
    rollout = dict(chosen["rollout"])
    if method == "sft":
        family = [{"source": f"chat:{folder / 'chat.jsonl'}"}, {**family[0], "ratio": 0}]
        # As many rows a step as the others have rollouts.
        rollout["groups_per_step"] = rollout["groups_per_step"] * rollout["group_size"]
    if method == "distill":
        learn["teacher"] = {"source": str(folder / "rl")}
    config = from_dict(
        {
            "name": method,
            "seed": seed,
            "tasks": family,
            "rollout": rollout,
            "learn": learn,
            **{key: chosen[key] for key in ("model", "steps", "eval", "store")},
        }
    )
    start = time.perf_counter()
    run_config(config, folder / method)
    return time.perf_counter() - start


def drift(method: str, folder: Path) -> dict[str, Any]:
    """What `treadle drift` says, through the command that a user types."""
    untouched = [f"--tasks=jsonl:{folder / name}" for name in ("small.jsonl", "large.jsonl")]
    asked = [f"--questions={QUESTIONS}", f"--samples={SAMPLES}", "--json"]
    command = [sys.executable, "-m", "treadle.cli.main", "drift", str(folder / method)]
    done = subprocess.run(
        [*command, *untouched, *asked], check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(done.stdout)


def measure(seed: int) -> list[dict[str, Any]]:
    """A row per method."""
    from treadle.api import Run

    out = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_sources(folder)
        for method in METHODS:
            seconds = train(method, seed, folder)
            held_out = Run(folder / method).results()["eval"]
            moved = drift(method, folder)
            trained, *untouched = moved["tasksets"]
            weights = next(kind for kind in moved["weights"] if kind["kind"] == "all")
            out.append(
                {
                    "setting": setting(),
                    "method": method,
                    "seed": seed,
                    "commit": commit(),
                    "seconds": round(seconds, 1),
                    **{side: held_out[side]["mean"] for side in ("before", "after", "gain")},
                    "gain_ci95": held_out["gain"]["ci95"],
                    "n": held_out["gain"]["n"],
                    "to_start": trained["to_start"],
                    "from_start": trained["from_start"],
                    "untouched": {
                        Path(d["taskset"]).stem: {
                            **{side: d[side]["mean"] for side in ("before", "after", "gain")},
                            "gain_ci95": d["gain"]["ci95"],
                            "kl_from_start": d["from_start"]["kl_nats"],
                        }
                        for d in untouched
                    },
                    "weights": weights,
                }
            )
            say(f"seed {seed}, {method}: {out[-1]['before']:.3f} -> {out[-1]['after']:.3f}")
    return out


def figures(table: dict[tuple[str, int], dict[str, Any]]) -> dict[str, float]:
    seeds = [s for s in SEEDS if all((m, s) in table for m in METHODS)]
    out: dict[str, float] = {f"{NAME}.seeds": len(seeds)}
    for method in METHODS:
        found = [table[method, seed] for seed in seeds]
        losses = [-s["gain"] for row in found for s in row["untouched"].values()]
        values = {
            "after": statistics.fmean(r["after"] for r in found),
            "gain": statistics.fmean(r["gain"] for r in found),
            "gain_low": min(r["gain"] for r in found),
            "kl_from_start": statistics.fmean(r["from_start"]["kl_nats"] for r in found),
            "forgot": statistics.fmean(losses),
        }
        out |= {f"{NAME}.{method}.{name}": value for name, value in values.items()}
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--full", action="store_true", help="every seed without a row")
    parser.add_argument("--json", action="store_true", help="only the document on stdout")
    args = parser.parse_args()
    from treadle import machine

    machine.tune()
    now = setting()
    have = {(row["method"], row["seed"]) for row in rows(NAME) if row["setting"] == now}
    missing = [s for s in SEEDS if not all((m, s) in have for m in METHODS)]
    for seed in missing if args.full else SEEDS[:1]:
        say(f"seed {seed}: about two minutes of CPU")
        for row in measure(seed):
            add_row(NAME, row)
    latest = {(row["method"], row["seed"]): row for row in rows(NAME) if row["setting"] == now}
    finish(NAME, figures(latest), {"rows": [latest[key] for key in sorted(latest)]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
