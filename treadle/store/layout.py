"""Names inside a run directory: the one place that knows them.

    RUN/
    |-- run.db                    the ledger (SQLite, WAL; -wal and -shm while it is open)
    |-- run.lock                  held by the one writer: its pid and host
    `-- checkpoints/
        |-- step-00000010/        complete once manifest.json is in it, which is written last
        `-- .tmp-* .trash-*       work of a save or a removal that did not end

Takes: a run directory. Gives: paths.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

DATABASE = "run.db"
LOCK = "run.lock"
CHECKPOINTS = "checkpoints"
MANIFEST = "manifest.json"
TEMPORARY = ".tmp-"
TRASH = ".trash-"

_STEP = re.compile(r"step-(\d{8,})")


def checkpoint_dir(run_dir: Path, step: int) -> Path:
    """Directory of the state after `step` (0 = before the first step)."""
    return run_dir / CHECKPOINTS / f"step-{step:08d}"


def checkpoint_step(path: Path) -> int | None:
    """The step of a checkpoint directory, or None for any other name."""
    match = _STEP.fullmatch(path.name)
    return int(match.group(1)) if match else None


def is_complete(checkpoint: Path) -> bool:
    """Whether the complete mark is there; the weights room also verifies the content."""
    return (checkpoint / MANIFEST).is_file()


def sync_dir(path: Path) -> None:
    """Make renames in a directory survive a power cut. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
