"""`treadle tasks show|validate SOURCE`: look at a task set, and at what it pays for nothing.

Takes: a source or a recipe. Gives: tasks with their gold answers, or checks; exit 1 when one fails.
"""

from __future__ import annotations

import argparse

from treadle.cli import recipes
from treadle.cli.arguments import add_set, positive
from treadle.cli.output import print_json, print_table
from treadle.config import RunConfig, TasksConfig, override
from treadle.errors import ConfigError

EXAMPLE = (
    "examples:\n"
    "  treadle tasks show reasoning_gym:gcd -n 3\n"
    "  treadle tasks validate jsonl:data/tasks.jsonl\n"
    "  treadle tasks validate 10_first_run"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, text in (("show", "print tasks"), ("validate", "gold must pay 1, nothing else much")):
        sub = actions.add_parser(
            name, help=text, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        sub.add_argument("source", help='"jsonl:PATH", "reasoning_gym:FAMILY", or a recipe')
        default = 5 if name == "show" else 60
        sub.add_argument("-n", type=positive, default=default, help="tasks to look at")
        sub.add_argument("--split", default="train", help="train, val or test")
        sub.add_argument("--seed", type=int, default=0)
        add_set(sub, "options.max_terms=2; of a recipe: tasks.0.options.max_terms=2")


def run(args: argparse.Namespace) -> int:
    configs = _configs(args)
    if args.action == "show":
        return _show(args, configs)
    from treadle.tasks import open_taskset, validate

    reports = [validate(open_taskset(c, args.seed), n=args.n, split=args.split) for c in configs]
    if args.json:
        print_json({"tasksets": [r.to_dict() for r in reports]})
    else:
        for report in reports:
            print_table(["check", "", "found"], report.rows(), title=report.taskset)
            print()
    return 0 if all(r.ok for r in reports) else 1


def _configs(args: argparse.Namespace) -> list[TasksConfig]:
    if recipes.is_source(args.source):
        config = RunConfig(tasks=(TasksConfig(source=args.source),))
        return list(override(config, [f"tasks.0.{s}" for s in args.settings]).tasks)
    config = override(recipes.load(args.source), args.settings)
    if not config.tasks:
        raise ConfigError(f"recipe {args.source} has no task set")
    return list(config.tasks)


def _show(args: argparse.Namespace, configs: list[TasksConfig]) -> int:
    from treadle.tasks import open_taskset
    from treadle.tasks.open import first

    shown = []
    for config in configs:
        taskset = open_taskset(config, args.seed)
        for task in first(taskset, args.split, args.n):
            shown.append({"task": task, "gold": taskset.gold(task)})
    if args.json:
        print_json({"tasks": shown})
        return 0
    print_table(
        ["id", "shown to the model", "gold"],
        [
            (s["task"].id, " | ".join(m.content for m in s["task"].messages), s["gold"])
            for s in shown
        ],
    )
    return 0
