"""What the first run learns: held-out gains of recipes/10_first_run, one row per seed.

    python -m benchmarks.first_run --json           # measures one seed again (about 8 minutes)
    python -m benchmarks.first_run --full --json    # every seed that has no row yet
    python -m benchmarks.first_run --again --json   # every seed, at this commit

CPU budget: 72 steps x 4 s + evaluations = 6 to 8 minutes a seed, 3 seeds.

Rows are appended to results/first_run.jsonl, one per (setting, seed, commit); the setting is what
the recipe sets, but for the seed: an option of later code, left at its default, does not change
it. A row that is there is not made again, except by the default run, which measures seed 0 at the
current commit whether it has a row or not, and by `--again`, for code that changes numbers.

Figures, over the rows of the current setting:
- first_run.seeds: rows that count, at most one (the latest) per seed;
- first_run.strict_low, first_run.lenient_low: the smallest lower bound of the held-out paired gain
  (95%, clustered by question, mean over the families) among the seeds;
- first_run.strict_gain, first_run.lenient_gain: mean over the seeds;
- first_run.questions: distinct held-out questions.
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

from benchmarks.common import RESULTS, finish, say

NAME = "first_run"
ROWS = RESULTS / f"{NAME}.jsonl"
SEEDS = (0, 1, 2)


def setting() -> str:
    from treadle.cli.recipes import load
    from treadle.config import RunConfig, TasksConfig, to_dict

    config = to_dict(replace(load("10_first_run"), seed=0))
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


def commit() -> str:
    def git(*args: str) -> str:
        return subprocess.run(
            ["git", *args], capture_output=True, text=True, check=True, cwd=RESULTS
        ).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain") else "")


def measure(seed: int) -> dict[str, Any]:
    """Train and evaluate one seed through the command that a user types."""
    treadle = [str(Path(sys.executable).parent / "treadle")]
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "run"
        start = time.perf_counter()
        subprocess.run(
            [*treadle, "train", "10_first_run", "--run-dir", str(run), "--set", f"seed={seed}"],
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
        "setting": setting(),
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


def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="every seed without a row")
    parser.add_argument("--again", action="store_true", help="every seed, at this commit")
    parser.add_argument("--json", action="store_true", help="only the document on stdout")
    args = parser.parse_args()

    now = setting()
    have = {row["seed"] for row in rows() if row["setting"] == now}
    missing = [s for s in SEEDS if s not in have]
    for seed in SEEDS if args.again else missing if args.full else SEEDS[:1]:
        say(f"seed {seed}: minutes")
        row = measure(seed)
        with ROWS.open("a") as file:
            file.write(json.dumps(row) + "\n")
    latest = {row["seed"]: row for row in rows() if row["setting"] == now}
    table = [latest[seed] for seed in sorted(latest)]
    gains = {rate: [row["gain"][rate] for row in table] for rate in ("strict", "lenient")}
    finish(
        NAME,
        {"first_run.seeds": len(table), "first_run.questions": min(row["n"] for row in table)}
        | {f"first_run.{rate}_low": min(g["ci95"][0] for g in of) for rate, of in gains.items()}
        | {
            f"first_run.{rate}_gain": sum(g["mean"] for g in of) / len(of)
            for rate, of in gains.items()
        },
        {"rows": table},
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
