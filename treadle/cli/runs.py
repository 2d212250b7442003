"""`treadle runs`: what is there, why one stopped, what can go.

Guarantees: `list` and `why` change nothing and work while a run is written; `gc` touches no run
that is being written, and with --dry-run nothing at all.

Takes: a directory of runs. Gives: tables.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle.cli.arguments import age, count
from treadle.cli.output import ago, print_json, print_pairs, print_table, size
from treadle.errors import ConfigError, StoreError
from treadle.evals import EVALUATED
from treadle.evals.visible import one_line

if TYPE_CHECKING:
    from treadle.store import RunSummary, Session, Store

EXAMPLE = (
    "examples:\n"
    "  treadle runs\n"
    "  treadle runs why runs/first-run\n"
    "  treadle runs gc --keep 5 --older-than 7d --dry-run"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    root = {"type": Path, "help": "directory of runs; default: runs"}
    parser.add_argument("--root", default=Path("runs"), **root)
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    listing = actions.add_parser(
        "list", help="runs, newest first (default)", epilog="example: treadle runs list --json"
    )
    why = actions.add_parser(
        "why", help="why a run stopped", epilog="example: treadle runs why runs/first-run"
    )
    why.add_argument("run_dir", type=Path, metavar="RUN")
    why.add_argument("--events", type=count, default=10, metavar="N", help="last events to show")
    gc = actions.add_parser(
        "gc",
        help="remove old runs, and what resume does not need of the others",
        epilog="example: treadle runs gc --keep 5 --older-than 7d --dry-run",
    )
    gc.add_argument("--keep", type=count, default=10, metavar="N", help="newest runs that stay")
    gc.add_argument(
        "--older-than",
        type=age,
        default="30d",
        metavar="AGE",
        help="further runs go when nothing was written to them for so long, e.g. 12h, 7d, 2w",
    )
    gc.add_argument("--dry-run", action="store_true", help="list only")
    for each in (listing, gc):
        each.add_argument("--root", default=argparse.SUPPRESS, **root)
    parser.set_defaults(action="list")


def run(args: argparse.Namespace) -> int:
    return {"list": _list, "why": _why, "gc": _gc}[args.action](args)


# --------------------------------------------------------------------------- list


def _list(args: argparse.Namespace) -> int:
    from treadle.store import list_runs

    rows = [(summary, *_look(summary)) for summary in list_runs(args.root)]
    if args.json:
        print_json({"root": args.root, "runs": [_row(*row) for row in rows]})
        return 0
    if not rows:
        print(f"no runs in {args.root}; treadle train 10_first_run makes one")
        return 0
    print_table(
        ["run", "status", "steps", "reward", "size", "last written", "started"],
        [
            (
                s.path,
                f"{s.status}: {one_line(s.problem, 60)}" if s.problem else s.status,
                f"{s.steps_done}/{max(s.steps_done, s.steps_asked)}" if kind == "run" else kind,
                "-" if reward is None else f"{reward:.3f}",
                size(s.size.total),
                f"{ago(s.updated_at)} ago",
                _moment(s.created_at),
            )
            for s, kind, reward in rows
        ],
    )
    return 0


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if seconds else "-"


def _look(summary: RunSummary) -> tuple[str, float | None]:
    """ "run" or "evaluation", and the last mean reward."""
    from treadle.store import Store

    try:
        with Store.open(summary.path, readonly=True) as store:
            values = store.metrics(axis="train", name="reward/mean")
            kind = "evaluation" if EVALUATED in store.info().provenance else "run"
    except StoreError:
        return "run", None
    return kind, values[-1].value if values else None


def _row(summary: RunSummary, kind: str, reward: float | None) -> dict[str, Any]:
    return {
        "path": summary.path,
        "kind": kind,
        "name": summary.name,
        "status": summary.status,
        "steps_done": summary.steps_done,
        "steps_asked": summary.steps_asked,
        "last_reward": reward,
        "bytes": summary.size.total,
        "checkpoint_bytes": summary.size.checkpoints,
        "created_at": summary.created_at,
        "updated_at": summary.updated_at,
        "writer_pid": summary.writer.pid if summary.writer else None,
        "problem": summary.problem,
    }


# --------------------------------------------------------------------------- why


def _why(args: argparse.Namespace) -> int:
    from treadle.cli.target import existing_run
    from treadle.store import Store

    with Store.open(existing_run(args.run_dir), readonly=True) as store:
        found = _explain(store, args.run_dir, args.events)
    if args.json:
        print_json(found)
        return 0
    checkpoint = found["checkpoint_step"]
    pairs = [
        ("run", args.run_dir),
        ("status", found["status"]),
        ("cause", found["cause"] or "none recorded"),
        ("sessions", len(found["sessions"])),
        ("next", found["hint"]),
    ]
    if found["kind"] == "run":
        pairs[3:3] = [
            ("steps", f"{found['steps_done']} of {found['steps_asked']} committed"),
            ("checkpoint", "none yet" if checkpoint is None else f"of step {checkpoint}"),
            ("dropped groups", _counts(found["dropped"])),
            ("errors", _counts(found["errors"])),
        ]
    print_pairs(pairs)
    if found["events"]:
        print()
        print_table(
            ["when", "event", "what"],
            [
                (
                    time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(e["time"])),
                    e["kind"],
                    e["data"],
                )
                for e in found["events"]
            ],
        )
    return 0


def _explain(store: Store, run_dir: Path, num_events: int) -> dict[str, Any]:
    from treadle.evals.report import go_on, status_of

    info, frontier = store.info(), store.frontier()
    status, cause = status_of(store, info)
    asked = int(info.config.get("steps", 0))
    dropped = Counter(p.reason for p in store.prompts(state="dropped"))
    rows = store.trajectories()
    errors = Counter(f"{r.error.kind}: {r.error.message}"[:160] for r in rows if r.error)
    kind = "evaluation" if EVALUATED in info.provenance else "run"
    return {
        "run": run_dir,
        "kind": kind,
        "status": status,
        "cause": cause,
        "steps_done": frontier.step,
        "steps_asked": asked,
        "checkpoint_step": frontier.checkpoint.step if frontier.checkpoint else None,
        "sessions": [_session(s) for s in info.sessions],
        "dropped": dict(dropped.most_common(5)),
        "errors": dict(errors.most_common(5)),
        "events": [
            {"time": e.time, "kind": e.kind, "data": dict(e.data)}
            for e in (store.events()[-num_events:] if num_events else ())
        ],
        "hint": _next(status, run_dir, frontier.step, kind, go_on(info, run_dir)),
    }


def _next(status: str, run_dir: Path, done: int, kind: str, go_on: str) -> str:
    if status == "running":
        return "nothing: it is being written now"
    if kind == "evaluation":
        return "the same treadle eval again makes what is missing, and prints the rates"
    if status == "finished":
        return f"treadle report {run_dir}"
    kept = f"the {done} committed steps are kept" if done else ""
    return "; ".join(part for part in (go_on, kept) if part) or "begin it anew"


def _session(session: Session) -> dict[str, Any]:
    return {
        "pid": session.pid,
        "host": session.host,
        "started_at": session.started_at,
        "ended_at": session.ended_at,
        "status": session.status,
        "cause": session.cause,
    }


def _counts(counts: dict[str, int]) -> str:
    return "; ".join(f"{n} x {what}" for what, n in counts.items()) or "none"


# --------------------------------------------------------------------------- gc


def _gc(args: argparse.Namespace) -> int:
    from treadle.store import gc

    if not args.root.is_dir():
        raise ConfigError(f"there is no directory {args.root}", hint="name one with --root")
    removals = gc(args.root, keep=args.keep, older_than_s=args.older_than, dry_run=args.dry_run)
    freed = sum(r.bytes for r in removals if not r.problem)
    if args.json:
        print_json({"dry_run": args.dry_run, "removed": removals, "bytes": freed})
    else:
        print_table(
            ["what", "path", "size", "why", "problem"],
            [(r.kind, r.path, size(r.bytes), r.reason, r.problem) for r in removals],
        )
        verb = "would be freed" if args.dry_run else "freed"
        print(f"{size(freed)} {verb}")
    return 1 if any(r.problem for r in removals) else 0
