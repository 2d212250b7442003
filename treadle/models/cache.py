"""The user's model cache: each model is there whole or not at all.

Guarantees: `install` fills a hidden directory and renames it, so that a crash at any instant
leaves no half model; what a killed process left is removed by the next; two processes that
install the same model make it once; a directory made from something else than asked (another
pinned digest, another recipe) is made anew. No torch.

    $TREADLE_CACHE/models/NAME/              config, weights, tokenizer, treadle.json
    $TREADLE_CACHE/models/.NAME.lock         held while NAME is being made
    $TREADLE_CACHE/models/.NAME.PID.part/    being made

Takes: a name and a function that fills a directory. Gives: the model's directory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from treadle.errors import ModelError
from treadle.machine import cache_dir
from treadle.models import files
from treadle.types import Provenance

LOCK_WAIT_S = 1800.0
"""Longest wait for another process that makes the same model."""


def models_dir() -> Path:
    return cache_dir() / "models"


def installed(name: str, recipe: str = "") -> Path | None:
    """The model's directory, or None. With `recipe`: None too when it was made from another."""
    path = models_dir() / name
    if not (path / files.RECORD).is_file() or not files.is_complete(path):
        return None
    if recipe and record(path).get("recipe") != recipe:
        return None
    return path


def record(path: Path) -> dict[str, Any]:
    """What a directory says it was made from; {} when we did not make it."""
    if not (path / files.RECORD).is_file():
        return {}
    return files.read_json(path / files.RECORD)


def install(
    name: str,
    build: Callable[[Path], None],
    *,
    recipe: str,
    provenance: Provenance,
    detail: Mapping[str, Any] | None = None,
    need_bytes: int = 0,
) -> Path:
    """Make `models/NAME` with `build(directory)` unless it is there already.

    Args:
        build: fills an empty directory; whatever it raises leaves the cache as it was.
        recipe: identifies what the model is made from, e.g. a pinned digest.
        detail: further JSON values for treadle.json.
        need_bytes: free disk that the build takes at its worst; refused up front if missing.

    Raises:
        ModelError: no room on the disk, no permission, another process holds the lock too long,
            or `build` left an incomplete directory.
    """
    if path := installed(name, recipe):
        return path
    root = models_dir()
    part = root / f".{name}.{os.getpid()}.part"
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _lock(root / f".{name}.lock", name):
            if path := installed(name, recipe):
                return path
            for stale in root.glob(f".{name}.*.part"):
                shutil.rmtree(stale, ignore_errors=True)
            _require_space(root, need_bytes)
            part.mkdir()
            build(part)
            if not files.is_complete(part):
                held = ", ".join(sorted(p.name for p in part.iterdir())) or "nothing"
                raise ModelError(f"building {name} left an incomplete model: {held}")
            _write_record(part, recipe, provenance, detail or {})
            _swap(part, root / name)
    except OSError as error:
        raise _disk_error(root, error) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return root / name


def _write_record(
    part: Path, recipe: str, provenance: Provenance, detail: Mapping[str, Any]
) -> None:
    weights = files.weight_files(part)
    content = {
        "recipe": recipe,
        "source": provenance.source,
        "license": provenance.license,
        "sha256": provenance.sha256 or files.sha256_of(weights),
        "weights_sha256": files.sha256_of(weights),
        **detail,
    }
    text = json.dumps(content, indent=2, sort_keys=True)
    with (part / files.RECORD).open("w", encoding="utf-8") as handle:
        handle.write(text + "\n")
        handle.flush()
        os.fsync(handle.fileno())


def _swap(part: Path, final: Path) -> None:
    """Put `part` in the place of `final`; readers keep the files they have open."""
    if final.exists():
        aside = final.with_name(f".{final.name}.old.part")
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(final, aside)
        os.replace(part, final)
        shutil.rmtree(aside, ignore_errors=True)
    else:
        os.replace(part, final)


@contextlib.contextmanager
def _lock(path: Path, name: str) -> Iterator[TextIO]:
    """Hold a file lock; the kernel frees it when its process dies."""
    with path.open("w") as handle:
        deadline = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ModelError(
                        f"another process has been making {name} for over {LOCK_WAIT_S:.0f} s",
                        hint=f"end that process; it holds {path}",
                    ) from None
                time.sleep(0.2)
        yield handle


def _require_space(root: Path, need_bytes: int) -> None:
    free = shutil.disk_usage(root).free
    if free < need_bytes:
        raise ModelError(
            f"{root}: {free / 1e9:.2f} GB free, {need_bytes / 1e9:.2f} GB needed",
            hint="free some disk, or set TREADLE_CACHE to a directory on another disk",
        )


def _disk_error(root: Path, error: OSError) -> ModelError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = shutil.disk_usage(root).free if root.exists() else 0
        return ModelError(
            f"{root}: the disk is full ({free / 1e9:.2f} GB free); nothing was kept",
            hint="free some disk, or set TREADLE_CACHE to a directory on another disk",
        )
    return ModelError(
        f"{root}: {error}", hint="set TREADLE_CACHE to a directory that you can write to"
    )
