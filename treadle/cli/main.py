"""`treadle`: parse, run one command, turn errors into exit codes.

Takes: sys.argv. Gives: an exit code; an error is its message and a `hint:` line on stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import logging
import sys
from collections.abc import Sequence

import treadle
from treadle.cli.output import print_json
from treadle.errors import TreadleError

COMMANDS = {
    "doctor": "what this machine has, and what Treadle does with it",
    "models": "list known models, or pull one",
    "tasks": "show or validate a task set",
    "train": "train a recipe",
    "eval": "evaluate a model or a run on held-out tasks",
    "report": "what a run did: before and after, curves, costs",
    "sample": "talk to the result of a run",
    "export": "write a run's result as a PEFT adapter or a merged model",
    "runs": "list runs, see why one stopped, free disk space",
}


class _Parser(argparse.ArgumentParser):
    """Errors end with a hint and exit code 2."""

    def error(self, message: str) -> None:  # type: ignore[override]
        self.print_usage(sys.stderr)
        self.exit(2, f"{self.prog}: {message}\nhint: {self.prog} --help shows an example\n")


def parser() -> argparse.ArgumentParser:
    top = _Parser(
        prog="treadle",
        description="Turn an open-weight language model plus the tasks of one domain into a "
        "better model.",
        epilog="example: treadle train 10_first_run --run-dir runs/first-run",
    )
    top.add_argument("--version", action="version", version=f"treadle {treadle.__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        module = importlib.import_module(f"treadle.cli.{name}")
        sub = commands.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            epilog=module.EXAMPLE,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(sub)
        for leaf in _leaves(sub):
            leaf.add_argument("--json", action="store_true", help="one JSON document on stdout")
            leaf.add_argument("-v", "--verbose", action="store_true", help="logs on stderr")
        sub.set_defaults(run=module.run)
    return top


def _leaves(sub: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """The parsers that end a command line: the sub-commands' where there are any, and `sub`."""
    leaves = [sub]
    for action in sub._actions:
        if isinstance(action, argparse._SubParsersAction):
            leaves = [p for p in action.choices.values()]
    return leaves


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    logging.basicConfig(
        level=logging.INFO if getattr(args, "verbose", False) else logging.WARNING,
        format="%(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    try:
        return args.run(args) or 0
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("interrupted; what was committed is kept, --resume goes on", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 0
    except TreadleError as error:
        if getattr(args, "json", False):
            print_json(
                {
                    "error": {
                        "kind": type(error).__name__,
                        "message": error.message,
                        "hint": error.hint,
                    }
                }
            )
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
