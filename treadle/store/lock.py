"""Who may write a run, and who is reading its files.

Guarantees: one writer per run, on this machine; the lock ends with its process, however that
dies, and is not inherited by a forked child. A directory that is held for reading is not
removed by anyone who asks with `exclusive`.

The lock is the kernel's (flock), so a stale file never blocks; its content (pid, host, since)
is for the message alone. A run lives on a local disk: where the file system has no locks,
opening for writing is refused.

Takes: paths. Gives: held locks, or a StoreError that names the holder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from treadle.errors import RUN_DIR, StoreError
from treadle.store.layout import LOCK

_PROBE_S = 0.05
"""A look at a lock holds it for microseconds; the writer tries again after this."""

_held: set[int] = set()


def _forget_in_child() -> None:
    # flock belongs to the open file, which a forked child shares: without this, a grader that
    # outlives the controller would keep the run locked.
    for fd in _held:
        with contextlib.suppress(OSError):
            os.close(fd)
    _held.clear()


os.register_at_fork(after_in_child=_forget_in_child)


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that writes a run; `pid` 0 = it has not yet said who it is."""

    pid: int
    host: str
    since: float
    """Seconds since the epoch."""


class Lock:
    """A held lock; `release` gives it back."""

    def __init__(self, fd: int) -> None:
        self._fd: int | None = fd
        _held.add(fd)

    def release(self) -> None:
        """Idempotent."""
        fd, self._fd = self._fd, None
        if fd is not None and fd in _held:
            _held.discard(fd)
            os.close(fd)


def _take(path: Path, how: int, flags: int) -> Lock | None:
    """The lock, or None when another holds it. Raises OSError."""
    fd = os.open(path, flags | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except BaseException:
        os.close(fd)
        raise
    return Lock(fd)


def acquire(run_dir: Path) -> Lock:
    """Become the run's writer. Raises StoreError naming the process that is."""
    path = run_dir / LOCK
    for attempt in range(3):
        try:
            lock = _take(path, fcntl.LOCK_EX, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            unsupported = error.errno in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
            raise StoreError(
                f"cannot lock {path}: {error.strerror}",
                hint=f"a run needs a local disk that has file locks; choose another {RUN_DIR}"
                if unsupported
                else "is the run directory there, and writable?",
            ) from error
        if lock is not None:
            me = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
            # Written through its own descriptor: flock, unlike POSIX locks, survives its closing.
            path.write_text(json.dumps(me) + "\n", encoding="utf-8")
            return lock
        if attempt < 2:
            time.sleep(_PROBE_S)
    holder = _content(path)
    raise StoreError(
        f"run {run_dir} is being written by process {holder.pid} on {holder.host}",
        hint="wait for it or stop it; reading (report, view) works while it runs, and a second "
        f"run needs its own {RUN_DIR}",
    )


def writer(run_dir: Path) -> Holder | None:
    """The process that writes this run now, or None. Changes nothing."""
    path = run_dir / LOCK
    try:
        lock = _take(path, fcntl.LOCK_SH, os.O_RDONLY)
    except OSError:
        return None
    if lock is None:
        return _content(path)
    lock.release()
    return None


@contextlib.contextmanager
def shared(path: Path) -> Iterator[bool]:
    """Hold a file against `exclusive` while reading it; False when it is being removed.

    Raises OSError when the file is not there.
    """
    lock = _take(path, fcntl.LOCK_SH, os.O_RDONLY)
    try:
        yield lock is not None
    finally:
        if lock is not None:
            lock.release()


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[bool]:
    """Whether nobody holds the file; held until the end of the block. True when there is none."""
    try:
        lock = _take(path, fcntl.LOCK_EX, os.O_RDONLY)
    except FileNotFoundError:
        yield True
        return
    try:
        yield lock is not None
    finally:
        if lock is not None:
            lock.release()


def _content(path: Path) -> Holder:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        return Holder(int(tree["pid"]), str(tree["host"]), float(tree["since"]))
    except (OSError, ValueError, KeyError, TypeError):
        return Holder(0, "an unknown host", 0.0)
