"""`treadle train RECIPE`: resolve, plan, run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from treadle import machine
from treadle.api import Run, run_config
from treadle.cli import recipes
from treadle.cli.output import print_json
from treadle.config import RunConfig, override, to_dict
from treadle.errors import ConfigError
from treadle.store import Store

EXAMPLE = (
    "examples:\n"
    "  treadle train 10_first_run\n"
    "  treadle train 10_first_run --set rollout.group_size=4 --dry-run\n"
    "  treadle train 10_first_run --run-dir runs/first-run --resume --set steps=120"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="a name, a folder, or path.py:function")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="settings",
        metavar="KEY=VALUE",
        help="override a setting, e.g. --set learn.lr=1e-4",
    )
    parser.add_argument("--run-dir", type=Path, help="default: runs/NAME of the recipe")
    parser.add_argument("--dry-run", action="store_true", help="print config and plan, run nothing")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --run-dir")


def run(args: argparse.Namespace) -> int:
    machine.tune()
    config = override(recipes.load(args.recipe), args.settings)
    run_dir = args.run_dir or Path("runs") / config.name
    if args.dry_run:
        return _dry_run(args, config, run_dir)
    if args.resume:
        config = _resumed(args, run_dir)
    from treadle.cli.progress import TrainProgress

    with TrainProgress(config, run_dir, file=sys.stderr) as progress:
        run_config(config, run_dir, resume=args.resume, observer=progress)
    finished = Run(run_dir)
    if args.json:
        print_json({"run": run_dir, **finished.results()})
    else:
        print(finished.report())
    return 0


def _resumed(args: argparse.Namespace, run_dir: Path) -> RunConfig:
    """The stored config with this call's overrides: what began the run decides."""
    if not run_dir.is_dir():
        raise ConfigError(f"there is no run in {run_dir} to resume", hint="treadle runs lists them")
    with Store.open(run_dir, readonly=True) as store:
        return override(store.config(), args.settings)


def _dry_run(args: argparse.Namespace, config: RunConfig, run_dir: Path) -> int:
    from treadle.cli.plan import as_text, plan

    result = plan(config, run_dir)
    if args.json:
        print_json({"config": to_dict(config), "plan": result})
    else:
        print(as_text(config, result))
    return 0
