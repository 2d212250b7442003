"""`treadle models`: the known models; `treadle models pull NAME` gets one.

Takes: a name. Gives: a table, or the directory of a model that is on this machine now.
"""

from __future__ import annotations

import argparse
import sys

from treadle.cli.output import print_json, print_table, size

EXAMPLE = "examples:\n  treadle models\n  treadle models pull smollm2-135m"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    actions.add_parser(
        "list",
        help="known models and which are here (default)",
        epilog="example: treadle models list --json",
    )
    pull = actions.add_parser(
        "pull", help="get a model", epilog="example: treadle models pull smollm2-135m"
    )
    pull.add_argument("name", help="a known name, or a hub id")
    parser.set_defaults(action="list")


def run(args: argparse.Namespace) -> int:
    if args.action == "pull":
        return _pull(args)
    from treadle.models.catalog import listing

    rows = listing()
    if args.json:
        print_json({"models": rows})
        return 0
    print_table(
        ["name", "here", "parameters", "on disk", "licence", "what"],
        [
            (
                r.name,
                "yes" if r.present else "no",
                f"{r.parameters / 1e6:,.1f} M" if r.parameters else "-",
                size(r.bytes) if r.present else "-",
                r.license,
                r.description,
            )
            for r in rows
        ],
    )
    return 0


def _pull(args: argparse.Namespace) -> int:
    from treadle import machine

    machine.tune()
    from treadle.progress import StageBar

    with StageBar(file=sys.stderr) as bar:
        if args.name == "tiny-pretrained":
            from treadle.train.pretrain import install_tiny_pretrained

            bar.tell("train tiny-pretrained", None)
            path = install_tiny_pretrained()
        else:
            from treadle.models.pull import pull

            path = pull(args.name, progress=bar.tell)
    if args.json:
        print_json({"name": args.name, "path": path})
    else:
        print(f"{args.name} is in {path}")
    return 0
