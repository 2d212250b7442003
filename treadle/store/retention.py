"""What runs cost in bytes, and what can go: `treadle runs list` and `treadle runs gc`.

Guarantees: a run that is being written is not touched; the newest complete checkpoint of a run
goes only with the whole run; a directory that is not a run, or cannot be read as one, is never
removed; with `dry_run` nothing changes and the same list comes back.

Takes: a directory of runs. Gives: summaries, and a list of what was or would be removed.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from treadle.errors import StoreError
from treadle.store import lock
from treadle.store.layout import (
    CHECKPOINTS,
    DATABASE,
    MANIFEST,
    TEMPORARY,
    TRASH,
    checkpoint_step,
    is_complete,
)
from treadle.store.store import Store


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSize:
    """Bytes of a run directory, as files are long (not as blocks are allocated)."""

    database: int
    checkpoints: int
    other: int

    @property
    def total(self) -> int:
        return self.database + self.checkpoints + self.other


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """One row of `treadle runs list`."""

    path: Path
    name: str
    status: str
    """running | finished | failed | interrupted | unreadable"""
    steps_done: int
    steps_asked: int
    created_at: float
    updated_at: float
    size: RunSize
    writer: lock.Holder | None
    """The process that writes it now."""
    problem: str = ""
    """Why it is unreadable."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Removal:
    """Something that was, or with `dry_run` would be, removed."""

    path: Path
    kind: str
    """run | checkpoint | leftover"""
    bytes: int
    reason: str
    problem: str = ""
    """Why it could not be removed; it is still there then."""


def sizes(run_dir: str | Path) -> RunSize:
    """Bytes of a run. Files that vanish while they are counted count 0."""
    run_dir = Path(run_dir)
    database = checkpoints = other = 0
    for path, size in _files(run_dir):
        top = path.relative_to(run_dir).parts[0]
        if top.startswith(DATABASE):
            database += size
        elif top == CHECKPOINTS:
            checkpoints += size
        else:
            other += size
    return RunSize(database=database, checkpoints=checkpoints, other=other)


def list_runs(root: str | Path) -> tuple[RunSummary, ...]:
    """Runs below `root`, newest first; one that cannot be read is listed with its problem."""
    root = Path(root)
    if not root.is_dir():
        return ()
    runs = [
        _summary(path)
        for path in sorted(root.iterdir())
        if (path / DATABASE).is_file() and not path.name.startswith(TRASH)
    ]
    return tuple(sorted(runs, key=lambda run: run.updated_at, reverse=True))


def gc(root: str | Path, *, keep: int, older_than_s: float, dry_run: bool) -> tuple[Removal, ...]:
    """Remove old runs, and from the others what resume does not need.

    Args:
        root: directory whose children are runs.
        keep: the newest this many runs stay.
        older_than_s: further runs stay unless nothing was written to them for so long.
        dry_run: list only.

    Returns:
        Removals in order; of a run that stays: checkpoints older than its newest complete one,
        and leftovers of saves that were killed.
    """
    root = Path(root)
    removals: list[Removal] = []
    if not root.is_dir():
        return ()
    for path in sorted(root.iterdir()):
        if path.name.startswith(TRASH) and (path / DATABASE).is_file():
            removals.append(_remove(path, "leftover", "a removal that did not end", dry_run))
    now = time.time()
    for rank, run in enumerate(list_runs(root)):
        if run.status in ("running", "unreadable"):
            continue
        try:
            # Held while removing, so that nobody resumes the run in between.
            held = None if dry_run else lock.acquire(run.path)
        except StoreError:
            continue
        try:
            age = now - run.updated_at
            parts = [(run.path, "run", f"{run.status}, last written {age / 86400:.1f} days ago")]
            if rank < keep or age <= older_than_s:
                parts = list(_spare(run.path))
            removals.extend(_remove(*part, dry_run) for part in parts)
        finally:
            if held is not None:
                held.release()
    return tuple(removals)


def _spare(run_dir: Path) -> Iterator[tuple[Path, str, str]]:
    """What a run that stays can lose: path, kind, reason."""
    folder = run_dir / CHECKPOINTS
    if not folder.is_dir():
        return
    with Store.open(run_dir, readonly=True) as store:
        known = [c.at(run_dir) for c in store.checkpoints() if is_complete(c.at(run_dir))]
    newest = known[-1] if known else None
    for path in sorted(folder.iterdir()):
        if path.name.startswith((TEMPORARY, TRASH)):
            yield path, "leftover", "of a save or removal that did not end"
        elif newest is not None and checkpoint_step(path) is not None and path != newest:
            yield path, "checkpoint", f"the newest complete one is {newest.name}"


def _remove(path: Path, kind: str, reason: str, dry_run: bool) -> Removal:
    size = sum(size for _, size in _files(path))
    problem = ""
    if not dry_run:
        try:
            # Someone may be reading the weights: what is held stays.
            with lock.exclusive(path / MANIFEST) as free:
                if free:
                    remove_tree(path)
                else:
                    problem = "another process is reading it"
        except OSError as error:
            problem = f"{type(error).__name__}: {error}"
    return Removal(path=path, kind=kind, bytes=size, reason=reason, problem=problem)


def remove_tree(path: Path) -> None:
    """Remove a directory so that a half removed one is never taken for a whole. Raises OSError."""
    trash = path
    if not path.name.startswith(TRASH):
        trash = path.with_name(f"{TRASH}{path.name}-{os.getpid()}")
        os.rename(path, trash)
    shutil.rmtree(trash)


def _summary(path: Path) -> RunSummary:
    writer = lock.writer(path)
    updated = max(
        (p.stat().st_mtime for p in (path / DATABASE, path / f"{DATABASE}-wal") if p.exists()),
        default=0.0,
    )
    name, status, done, asked, created, problem = path.name, "unreadable", 0, 0, 0.0, ""
    try:
        with Store.open(path, readonly=True) as store:
            info, frontier = store.info(), store.frontier()
        name = str(info.config.get("name", path.name))
        asked = int(info.config.get("steps", 0))
        done, created, status = frontier.step, info.created_at, info.status
        if writer is not None:
            status = "running"
        elif status == "running":
            status = "interrupted"
    except StoreError as error:
        problem = str(error)
    return RunSummary(
        path=path,
        name=name,
        status=status,
        steps_done=done,
        steps_asked=asked,
        created_at=created,
        updated_at=updated,
        size=sizes(path),
        writer=writer,
        problem=problem,
    )


def _files(path: Path) -> Iterator[tuple[Path, int]]:
    for folder, _, names in os.walk(path):
        for name in names:
            file = Path(folder) / name
            try:
                yield file, file.lstat().st_size
            except OSError:
                continue
