"""`treadle report RUN`: before and after, curves, samples; `--html` writes one static page.

Guarantees: the run is only read, and may be written meanwhile.

Takes: a run directory. Gives: the report as text or JSON, and a page.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from treadle.cli.output import print_json

EXAMPLE = (
    "examples:\n  treadle report runs/first-run\n  treadle report runs/first-run --html report.html"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write one self-contained page")


def run(args: argparse.Namespace) -> int:
    from treadle.api import Run
    from treadle.cli.target import existing_run

    finished = Run(existing_run(args.run_dir))
    if args.html:
        from treadle.evals.page import write_page

        with finished.store() as store:
            write_page(store, args.html)
    if args.json:
        print_json(finished.results())
    else:
        print(finished.report())
        if args.html:
            print(f"\nwritten: {args.html}")
    return 0
