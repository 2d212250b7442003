"""`treadle doctor`: what this machine has and what Treadle chose because of it.

Takes: the machine. Gives: a table of checks; warnings say what to do. Exit 0 also with warnings.
"""

from __future__ import annotations

import argparse

from treadle.cli.output import print_json, print_wrapped

EXAMPLE = "example:\n  treadle doctor --json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--network", action="store_true", help="also see whether the model hub can be reached"
    )


def run(args: argparse.Namespace) -> int:
    from treadle.doctor import doctor

    result = doctor(network=args.network)
    if args.json:
        print_json(result)
    else:
        for check in result["checks"]:
            print_wrapped(f"{check['status']:<4}  {check['name']:<12}  ", check["reason"])
            if check["hint"]:
                print_wrapped(" " * 20 + "hint: ", check["hint"])
    return 0
