"""`treadle`: parse, run one command, turn errors into exit codes.

Guarantees: an error is its message and a `hint:` line on stderr, an unexpected one a traceback
whose last line is the cause; with `--json` stdout also gets {"error": ...}. SIGTERM unwinds like
Ctrl-C, so that whatever was opened is closed.

Takes: sys.argv. Gives: an exit code.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import io
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from typing import NoReturn

import treadle
from treadle.cli.output import print_json
from treadle.errors import ConfigError, HarnessError, Terminated, TreadleError, first_of, said

COMMANDS = {
    "doctor": "what this machine has, and what Treadle does with it",
    "models": "list known models, or pull one",
    "tasks": "show or validate a task set",
    "train": "train a recipe",
    "eval": "evaluate a model or a run on held-out tasks",
    "report": "what a run did: before and after, curves, costs",
    "drift": "what training did to the model: KL to its start, weights, other task sets",
    "plan": "predict lag, step period and utilization before a run",
    "sample": "talk to a model or to the result of a run",
    "export": "write a run's result as a PEFT adapter or a merged model",
    "runs": "list runs, see why one stopped, free disk space",
}

FAILED, INTERRUPTED, TERMINATED, PIPE_CLOSED = 1, 130, 143, 141


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        raise ConfigError(f"{self.prog}: {message}", hint=f"{self.prog} --help shows an example")


def parser() -> argparse.ArgumentParser:
    """The whole command line; every parser that ends one takes --json and -v."""
    top = _Parser(
        prog="treadle",
        description="Turn an open-weight language model plus the tasks of one domain into a "
        "better model.",
        epilog="example: treadle train 10_first_run --run-dir runs/first-run",
        allow_abbrev=False,
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
            allow_abbrev=False,
        )
        module.add_arguments(sub)
        sub.set_defaults(run=module.run, json=False, verbose=False)
        for each in (sub, *leaves(sub)):
            # Suppressed, so that a leaf does not undo what was given before its name.
            each.add_argument(
                "--json",
                action="store_true",
                default=argparse.SUPPRESS,
                help="one JSON document on stdout",
            )
            each.add_argument(
                "-v",
                "--verbose",
                action="store_true",
                default=argparse.SUPPRESS,
                help="logs and causes on stderr",
            )
    return top


def leaves(sub: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """The parsers of a parser's sub-commands; none when it has none."""
    return [
        each
        for action in sub._actions
        if isinstance(action, argparse._SubParsersAction)
        for each in action.choices.values()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line. Raises nothing but what the interpreter itself raises."""
    argv = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that cannot show a character gets its escape, not a crash.
            stream.reconfigure(errors="backslashreplace")
    if isinstance(sys.stdin, io.TextIOWrapper):
        # Bytes that are no text are what a user may well paste or pipe. Too late once read from.
        with contextlib.suppress(io.UnsupportedOperation):
            sys.stdin.reconfigure(errors="replace")
    as_json = "--json" in argv
    try:
        try:
            args = parser().parse_args(argv)
        except SystemExit as end:  # --help, --version
            return end.code if isinstance(end.code, int) else FAILED if end.code else 0
        _log(args.verbose)
        with _sigterm_unwinds():
            code = args.run(args) or 0
            sys.stdout.flush()
            return code
    except Terminated:
        print(_interrupted(argv), file=sys.stderr)
        return TERMINATED
    except SystemExit as end:
        # Not our way to end: some code of the user's, which says nothing about the command.
        error = HarnessError(
            f"the command was ended from inside: SystemExit: {said(end)}",
            hint="a recipe, task, tool, agent or reward called sys.exit(); let it return or raise",
        )
        error.__cause__ = end
        return _fail(error, as_json=as_json, verbose="-v" in argv or "--verbose" in argv)
    except KeyboardInterrupt:
        print(_interrupted(argv), file=sys.stderr)
        return INTERRUPTED
    except asyncio.CancelledError:
        print(_interrupted(argv), file=sys.stderr)
        return TERMINATED
    except BrokenPipeError:
        # The reader has left. The interpreter would complain when it flushes at its end.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except BaseException as error:
        return _fail(first_of(error), as_json=as_json, verbose="-v" in argv or "--verbose" in argv)


def _fail(error: BaseException, *, as_json: bool, verbose: bool) -> int:
    known = isinstance(error, TreadleError)
    if as_json:
        message, hint = (error.message, error.hint) if known else (str(error), "")
        tree = {"kind": type(error).__name__, "message": message, "hint": hint}
        print_json({"error": tree})
    if not known or verbose:
        traceback.print_exception(error)
    if known:
        from treadle.evals.visible import visible

        print(f"error: {visible(str(error))}", file=sys.stderr)
        return error.exit_code
    return FAILED


def _interrupted(argv: Sequence[str]) -> str:
    if "train" in argv:
        return "interrupted; what was committed is kept, --resume goes on"
    if "eval" in argv:
        return "interrupted; the answers so far are kept, the same command goes on"
    return "interrupted"


@contextlib.contextmanager
def _sigterm_unwinds() -> Iterator[None]:
    """Within the block SIGTERM raises Terminated(143), so that `with` blocks are left."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise Terminated(TERMINATED)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _log(verbose: bool) -> None:
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )


if __name__ == "__main__":
    sys.exit(main())
