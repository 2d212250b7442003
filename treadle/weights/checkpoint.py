"""Checkpoints: complete or absent, verified before they are trusted, few.

    RUN/checkpoints/step-00000010/   policy.safetensors ... state.json, then manifest.json

Guarantees (contract 11, B115, B116):
- a directory appears under its name only when every byte of it is on the disk: files, then the
  manifest with their sums, then the rename; killed anywhere, the ones before stay as they were;
- `load_latest` gives the newest one whose sums are right and names the ones it skipped;
- after a save the newest `keep` stay, and always the one before the new one, since the ledger may
  not have committed the new step yet: at most `keep` + 1 are ever on disk, plus those that
  another process is reading just now, which are never pulled away from it (B064);
- what cannot be removed is a warning; what cannot be written is a WeightsError that names the
  intact checkpoint, and leaves nothing behind.

Takes: the run's state after a step. Gives: a record for the ledger, and the state back.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError

from treadle.errors import RESUME, WeightsError, setting
from treadle.store import CheckpointRecord, layout, lock, sizes
from treadle.store.retention import remove_tree
from treadle.weights import tree

log = logging.getLogger(__name__)

T = TypeVar("T")

FORMAT = 1
"""Of the manifest and of what it lists; a newer one is not read."""

GIB = 1024.0**3

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    record: CheckpointRecord
    """For `Store.add_checkpoint` or `Store.commit_step`."""
    removed: tuple[str, ...]
    """Names of older checkpoints that went."""
    kept_back: tuple[str, ...]
    """"NAME: why" of those that should have gone and are still there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    checkpoint: CheckpointRecord | None
    """None = there is no good one: the run starts from its first weights."""
    state: dict[str, Any]
    """As given to `save`, tensors on the CPU; empty without a checkpoint."""
    skipped: tuple[str, ...]
    """"NAME: why" of newer ones that were not used."""


def save(
    run_dir: str | Path,
    step: int,
    state: Mapping[str, Any],
    *,
    keep: int,
    max_gib: float | None = None,
) -> Saved:
    """Save the state after `step` and remove what is older than the newest `keep`.

    Args:
        step: 0 = before the first step. A checkpoint of the same step is replaced.
        state: parts by name ("policy", "optimiser", "counters", ...), each a tree of tensors and
            JSON-like values; a part with tensors becomes a file of that name.
        keep: >= 1.
        max_gib: largest size of the run directory before the save.

    Raises:
        WeightsError: a value is neither tensor nor data, the run directory is larger than
            `max_gib`, or the disk refuses; then nothing has changed, and the message names the
            newest intact checkpoint.
    """
    if keep < 1:
        raise ValueError(f"keep must be >= 1, got {keep}")
    run_dir = Path(run_dir)
    if max_gib is not None:
        _check_size(run_dir, max_gib)
    final = layout.checkpoint_dir(run_dir, step)
    temporary = final.with_name(f"{layout.TEMPORARY}{final.name}")
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        _sweep(final.parent)
        temporary.mkdir()
        record = _write(run_dir, final, temporary, step, state)
        if final.exists():
            os.rename(final, final.with_name(f"{layout.TRASH}{final.name}"))
        os.rename(temporary, final)
        layout.sync_dir(final.parent)
    except (OSError, SafetensorError) as error:
        raise _refused(run_dir, step, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    _sweep(final.parent)
    removed, kept_back = _prune(run_dir, keep)
    return Saved(record=record, removed=removed, kept_back=kept_back)


def load_latest(run_dir: str | Path, *, at_most: int | None = None) -> Loaded:
    """The newest complete and verified checkpoint, held against removal while it is read.

    Args:
        at_most: largest step to accept, the ledger's `Frontier.step` on resume: a checkpoint of
            a step that was never committed must not be loaded.

    Without a good one the result has no checkpoint, and says why each was skipped.
    """
    found, state, skipped = _newest(Path(run_dir), at_most, tree.read)
    return Loaded(checkpoint=found, state=state or {}, skipped=skipped)


def discard_newer(run_dir: str | Path, step: int) -> tuple[str, ...]:
    """Remove checkpoints of steps that the ledger never committed; gives their names.

    On resume such a step is generated again and may differ; its old state must not come back.
    Raises WeightsError when one cannot be removed.
    """
    gone: list[str] = []
    for path, at in _candidates(Path(run_dir)):
        if at > step:
            try:
                remove_tree(path)
            except OSError as error:
                raise WeightsError(
                    f"cannot remove {path}, the state of a step that was never committed: {error}",
                    hint=f"remove it by hand, then {RESUME}",
                ) from error
            gone.append(path.name)
    return tuple(gone)


# --------------------------------------------------------------------------- parts


def _newest(
    run_dir: Path, at_most: int | None, use: Callable[[Path], T]
) -> tuple[CheckpointRecord | None, T | None, tuple[str, ...]]:
    """The newest good checkpoint, what `use` made of it while it was held, and those skipped."""
    skipped: list[str] = []
    for path, step in _candidates(run_dir):
        if at_most is not None and step > at_most:
            skipped.append(f"{path.name}: the ledger has committed {at_most} steps only")
            continue
        mark = path / layout.MANIFEST
        try:
            with lock.shared(mark) as free:
                if not free:
                    continue  # on its way out
                record = _verify(run_dir, path, step)
                made = use(path)
                if _sha256(mark) != record.sha256:
                    raise WeightsError("it was saved again while it was read")
                return record, made, tuple(skipped)
        except WeightsError as error:
            skipped.append(f"{path.name}: {error.message}")
        except OSError as error:
            if not path.exists():
                continue  # removed between two looks
            missing = isinstance(error, FileNotFoundError) and not mark.exists()
            why = f"not complete, {layout.MANIFEST} is missing" if missing else error
            skipped.append(f"{path.name}: {why}")
    return None, None, tuple(skipped)


def _write(
    run_dir: Path, final: Path, temporary: Path, step: int, state: Mapping[str, Any]
) -> CheckpointRecord:
    files = {}
    for name in tree.write(temporary, state):
        files[name] = {"bytes": _sync(temporary / name), "sha256": _sha256(temporary / name)}
    manifest = {"format": FORMAT, "step": step, "saved_at": time.time(), "files": files}
    mark = temporary / layout.MANIFEST
    mark.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    _sync(mark)
    layout.sync_dir(temporary)
    return _record(run_dir, final, step, files, mark)


def _record(
    run_dir: Path, path: Path, step: int, files: Mapping[str, Any], mark: Path
) -> CheckpointRecord:
    return CheckpointRecord(
        step=step,
        path=path.relative_to(run_dir).as_posix(),
        bytes=sum(f["bytes"] for f in files.values()) + mark.stat().st_size,
        sha256=_sha256(mark),
    )


def _verify(run_dir: Path, path: Path, step: int) -> CheckpointRecord:
    """Raises WeightsError saying what is wrong, FileNotFoundError without a manifest."""
    mark = path / layout.MANIFEST
    text = mark.read_text(encoding="utf-8", errors="replace")
    try:
        manifest = json.loads(text)
        version, marked, files = manifest["format"], manifest["step"], dict(manifest["files"])
        sums = {name: (f["bytes"], f["sha256"]) for name, f in files.items()}
    except (ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"{layout.MANIFEST} is damaged") from error
    if version != FORMAT:
        raise WeightsError(f"format {version}, this Treadle reads format {FORMAT}")
    if marked != step:
        raise WeightsError(f"{layout.MANIFEST} is that of step {marked}")
    for name, (size, digest) in sums.items():
        file = path / name
        if not file.is_file():
            raise WeightsError(f"{name} is missing")
        if (found := file.stat().st_size) != size:
            raise WeightsError(f"{name} has {found} bytes, expected {size}")
        if _sha256(file) != digest:
            raise WeightsError(f"{name} is damaged (its sha256 is not that of the manifest)")
    return _record(run_dir, path, step, files, mark)


def _candidates(run_dir: Path) -> Iterator[tuple[Path, int]]:
    """Checkpoint directories and steps, newest first; sees those that appear meanwhile.

    A reader that was slow finds the ones it saw gone and newer ones in their place.
    """
    folder = run_dir / layout.CHECKPOINTS
    seen: set[int] = set()
    while True:
        steps = {
            step
            for path in (folder.iterdir() if folder.is_dir() else ())
            if (step := layout.checkpoint_step(path)) is not None
        }
        if not steps - seen:
            return
        step = max(steps - seen)
        seen.add(step)
        yield layout.checkpoint_dir(run_dir, step), step


def _prune(run_dir: Path, keep: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    complete = [path for path, _ in _candidates(run_dir) if layout.is_complete(path)]
    removed: list[str] = []
    kept_back: list[str] = []
    for path in complete[max(keep, 2) :]:
        try:
            with lock.exclusive(path / layout.MANIFEST) as free:
                if free:
                    remove_tree(path)
                    removed.append(path.name)
                else:
                    kept_back.append(f"{path.name}: another process is reading it")
        except OSError as error:
            kept_back.append(f"{path.name}: {error}")
            log.warning("could not remove the old checkpoint %s: %s", path, error)
    return tuple(removed), tuple(kept_back)


def _sweep(folder: Path) -> None:
    """Remove what a save replaced or a killed one left: there is one writer, so nobody needs it."""
    for path in folder.iterdir():
        if path.name.startswith((layout.TEMPORARY, layout.TRASH)):
            try:
                shutil.rmtree(path)
            except OSError as error:
                log.warning("could not remove %s, which nobody needs: %s", path, error)


def _check_size(run_dir: Path, max_gib: float) -> None:
    size = sizes(run_dir)
    if size.total > max_gib * GIB:
        raise WeightsError(
            f"{run_dir} is {size.total / GIB:.2f} GiB (ledger {size.database / GIB:.2f}, "
            f"checkpoints {size.checkpoints / GIB:.2f}, other {size.other / GIB:.2f}), more than "
            f"store.max_gib = {max_gib:g}",
            hint=f"{RESUME} with a larger limit: {setting('store.max_gib=...')}",
        )


def _refused(run_dir: Path, step: int, error: Exception) -> WeightsError:
    intact, _, _ = _newest(run_dir, None, lambda path: None)
    previous = "there is no earlier checkpoint"
    if intact is not None:
        previous = f"the checkpoint of step {intact.step} ({intact.path}) is intact"
    full = getattr(error, "errno", None) in _NO_SPACE or any(
        f"os error {code}" in str(error) for code in _NO_SPACE
    )
    return WeightsError(
        f"cannot save the checkpoint of step {step} in {run_dir}: "
        f"{'no space left on the disk' if full else error}; {previous}",
        hint=f"free space (`treadle runs gc` lists what can go), then {RESUME}"
        if full
        else f"is the disk there, and may this user write to it? Then {RESUME}",
    )


def _sync(path: Path) -> int:
    """Force a file to the disk; gives its size."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        return os.fstat(fd).st_size
    finally:
        os.close(fd)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
