"""`treadle models`: the known models; `treadle models pull NAME` gets one."""

from __future__ import annotations

import argparse
import sys

from treadle import machine
from treadle.cli.output import mib, print_json, print_table

EXAMPLE = "examples:\n  treadle models\n  treadle models pull smollm2-135m"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    actions.add_parser("list", help="known models and which are here (default)")
    pull = actions.add_parser(
        "pull", help="get a model", epilog="example: treadle models pull smollm2-135m"
    )
    pull.add_argument("name", help="a known name")
    parser.set_defaults(json=False, verbose=False)


def run(args: argparse.Namespace) -> int:
    if args.action == "pull":
        return _pull(args)
    from treadle.models.catalog import listing

    rows = listing()
    if args.json:
        print_json({"models": rows})
        return 0
    print_table(
        ["name", "here", "parameters", "size", "licence", "what"],
        [
            (
                r.name,
                "yes" if r.path else "no",
                f"{r.parameters / 1e6:,.1f} M",
                mib(r.size_bytes) if r.path else "-",
                r.license,
                r.description,
            )
            for r in rows
        ],
    )
    return 0


def _pull(args: argparse.Namespace) -> int:
    machine.tune()
    from treadle.cli.progress import StageBar

    if args.name == "tiny-pretrained":
        from treadle.train.pretrain import ensure_tiny_pretrained

        path = ensure_tiny_pretrained()
    else:
        from treadle.models.pull import pull

        with StageBar(file=sys.stderr) as bar:
            path = pull(args.name, progress=bar.tell)
    if args.json:
        print_json({"name": args.name, "path": path})
    else:
        print(f"{args.name} is in {path}")
    return 0
