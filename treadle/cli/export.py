"""`treadle export RUN [OUT]`: the newest checkpoint of a run as files for others.

Takes: a run directory. Gives: a PEFT adapter or a merged Hugging Face directory, with a card.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from treadle.cli.output import print_json, print_pairs, size

EXAMPLE = (
    "examples:\n"
    "  treadle export runs/first-run\n"
    "  treadle export runs/first-run exports/merged --form merged --dtype bfloat16"
)

DTYPES = ("float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN")
    parser.add_argument(
        "out",
        type=Path,
        nargs="?",
        metavar="OUT",
        help="a new or empty directory; default: exports/NAME of the run directory",
    )
    parser.add_argument(
        "--form",
        choices=("peft", "merged"),
        help="default: the adapter where the run trained one, else the whole model",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="of every float tensor; default: float32")
    parser.add_argument(
        "--force", action="store_true", help="replace an earlier model or adapter in OUT"
    )


def run(args: argparse.Namespace) -> int:
    from treadle import machine
    from treadle.cli.target import existing_run

    existing_run(args.run_dir)
    machine.tune()
    import torch

    from treadle.weights.export import export_run

    done = export_run(
        args.run_dir,
        args.out or Path("exports") / args.run_dir.resolve().name,
        form=args.form,
        dtype=getattr(torch, args.dtype) if args.dtype else None,
        force=args.force,
    )
    if args.json:
        print_json(done)
    else:
        print_pairs(
            [
                ("written", done.path),
                ("form", done.form),
                ("weights after step", done.step),
                ("size", size(done.bytes)),
                ("files", ", ".join(done.files)),
            ]
        )
    return 0
