"""What a recipe learns on held-out questions, one row per seed: shared by benchmarks of recipes.

A row is what `treadle train RECIPE --set seed=N` and `treadle report` say: the command that a user
types. Rows are appended to results/NAME.jsonl, one per (setting, seed, commit); the setting is what
the recipe sets, but for the seed: an option of later code, left at its default, does not change it.

Takes: a recipe. Gives: rows, and figures over the rows of the current setting:
- NAME.seeds: rows that count, at most one (the latest) per seed;
- NAME.strict_low, NAME.lenient_low: the smallest lower bound of the held-out paired gain (95%,
  clustered by question, mean over the families) among the seeds;
- NAME.strict_gain, NAME.lenient_gain: mean over the seeds;
- NAME.questions: distinct held-out questions.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from benchmarks.common import add_row, commit, finish, rows, say

SEEDS = (0, 1, 2)


def setting(recipe: str) -> str:
    from treadle.cli.recipes import load
    from treadle.config import RunConfig, TasksConfig, to_dict

    config = to_dict(replace(load(recipe), seed=0))
    found = chosen(config, to_dict(RunConfig()))
    found["tasks"] = [chosen(tasks, to_dict(TasksConfig())) for tasks in config["tasks"]]
    return blake2b(json.dumps(found, sort_keys=True).encode(), digest_size=6).hexdigest()


def chosen(config: dict[str, Any], default: dict[str, Any]) -> dict[str, Any]:
    """What differs from the default, at any depth of sections."""
    return {
        key: chosen(value, default[key])
        if isinstance(value, dict) and isinstance(default.get(key), dict)
        else value
        for key, value in config.items()
        if key not in default or value != default[key]
    }


def measure(recipe: str, seed: int) -> dict[str, Any]:
    """Train and evaluate one seed through the command that a user types."""
    treadle = [str(Path(sys.executable).parent / "treadle")]
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "run"
        start = time.perf_counter()
        subprocess.run(
            [*treadle, "train", recipe, "--run-dir", str(run), "--set", f"seed={seed}"],
            check=True,
            stdout=sys.stderr,
        )
        seconds = time.perf_counter() - start
        report = json.loads(
            subprocess.run(
                [*treadle, "report", str(run), "--json"], check=True, capture_output=True, text=True
            ).stdout
        )
    held_out = report["eval"]
    return {
        "setting": setting(recipe),
        "seed": seed,
        "commit": commit(),
        "seconds": round(seconds, 1),
        "n": held_out["gain"]["n"],
        **{
            side: {
                rate: {"mean": values["mean"], "ci95": values["ci95"]}
                for rate, values in (
                    ("strict", held_out[side]),
                    ("lenient", held_out[side]["lenient"]),
                )
            }
            for side in ("before", "after", "gain")
        },
        "families": {
            name: {side: held_out[side]["tasksets"][name] for side in ("before", "after", "gain")}
            for name in held_out["gain"]["tasksets"]
        },
    }


def main(name: str, recipe: str, description: str) -> int:
    """Parse the command line, measure, append rows, and write the document."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--full", action="store_true", help="every seed without a row")
    parser.add_argument("--again", action="store_true", help="every seed, at this commit")
    parser.add_argument("--json", action="store_true", help="only the document on stdout")
    args = parser.parse_args()

    now = setting(recipe)
    have = {row["seed"] for row in rows(name) if row["setting"] == now}
    missing = [s for s in SEEDS if s not in have]
    for seed in SEEDS if args.again else missing if args.full else SEEDS[:1]:
        say(f"seed {seed}: minutes")
        row = measure(recipe, seed)
        add_row(name, row)
    latest = {row["seed"]: row for row in rows(name) if row["setting"] == now}
    table = [latest[seed] for seed in sorted(latest)]
    gains = {rate: [row["gain"][rate] for row in table] for rate in ("strict", "lenient")}
    finish(
        name,
        {f"{name}.seeds": len(table), f"{name}.questions": min(row["n"] for row in table)}
        | {f"{name}.{rate}_low": min(g["ci95"][0] for g in of) for rate, of in gains.items()}
        | {
            f"{name}.{rate}_gain": sum(g["mean"] for g in of) / len(of)
            for rate, of in gains.items()
        },
        {"rows": table},
    )
    return 0
