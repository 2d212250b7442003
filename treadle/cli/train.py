"""`treadle train RECIPE`: resolve, plan, run.

Guarantees: a mistake in recipe, settings or run directory ends the command before a model is
loaded; a run that is gone on with keeps the settings that it began with, and says where the recipe
has others; nothing is called done that was done before (B079).

Takes: a recipe and overrides. Gives: a run directory and its report.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

from treadle.cli import recipes
from treadle.cli.arguments import add_set
from treadle.cli.output import print_json
from treadle.config import RunConfig, override, to_dict
from treadle.evals.visible import one_line

EXAMPLE = (
    "examples:\n"
    "  treadle train 10_first_run\n"
    "  treadle train 10_first_run --set rollout.group_size=4 --dry-run\n"
    "  treadle train 10_first_run --run-dir runs/first-run --resume --set steps=120"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="a name, a folder, or path.py:function")
    add_set(parser, "learn.lr=1e-4")
    parser.add_argument("--run-dir", type=Path, help="default: runs/NAME of the recipe")
    parser.add_argument("--dry-run", action="store_true", help="print config and plan, run nothing")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --run-dir")


def run(args: argparse.Namespace) -> int:
    from treadle import machine

    machine.tune()  # a recipe may import torch
    config = override(recipes.load(args.recipe), args.settings)
    run_dir = args.run_dir or Path("runs") / config.name
    done = 0
    if args.resume:
        config, done, finished = _resumed(args, config, run_dir)
        if finished and done >= config.steps and not args.dry_run:
            return _nothing_to_do(args, run_dir, done)
    if args.dry_run:
        return _dry_run(args, config, run_dir)
    from treadle.api import Run, run_config
    from treadle.progress import TrainProgress

    if args.resume and done >= config.steps:
        print(f"no step is left to train of {done}; what was left after them", file=sys.stderr)
    with TrainProgress(config, run_dir, file=sys.stderr) as progress:
        run_config(
            config,
            run_dir,
            resume=args.resume,
            observer=progress,
            started_by=f"treadle train {shlex.quote(args.recipe)}",
        )
    result = Run(run_dir)
    if args.json:
        print_json({**result.results(), "new_steps": config.steps - done})
    else:
        print(result.report())
    return 0


def _resumed(
    args: argparse.Namespace, recipe: RunConfig, run_dir: Path
) -> tuple[RunConfig, int, bool]:
    """The stored config with this call's overrides, the steps done, and whether it finished."""
    from treadle.api import MAY_CHANGE, changes, check_is_run, check_resumable
    from treadle.cli.target import existing_run
    from treadle.store import Store

    with Store.open(existing_run(run_dir), readonly=True) as store:
        check_is_run(run_dir, store.info())
        stored, done = store.config(), store.frontier().step
        status = store.info().status
    config = override(stored, args.settings)
    check_resumable(stored, config, done)
    others = [c for c in changes(stored, recipe) if c[0] not in MAY_CHANGE]
    if others:
        print(
            f"{run_dir} keeps the settings that it began with, not the recipe's:", file=sys.stderr
        )
    for key, began, now in others:
        values = f"{json.dumps(began)} (recipe: {json.dumps(now)})"
        print(f"  {key} = {one_line(values, 160)}", file=sys.stderr)
    return config, done, status == "finished"


def _nothing_to_do(args: argparse.Namespace, run_dir: Path, done: int) -> int:
    from treadle.api import Run

    print(
        f"nothing was trained: {run_dir} has finished its {done} steps before\n"
        f"hint: --set steps={done + 10} trains 10 more",
        file=sys.stderr,
    )
    result = Run(run_dir)
    if args.json:
        print_json({**result.results(), "new_steps": 0})
    else:
        print(result.report())
    return 0


def _dry_run(args: argparse.Namespace, config: RunConfig, run_dir: Path) -> int:
    from treadle.cli.dry_run import as_text, plan

    result = plan(config, run_dir)
    if args.json:
        print_json({"config": to_dict(config), "plan": result})
    else:
        print(as_text(config, result))
    return 0
