"""Ends processes that left the group of the worker that started them (by `setsid`, as daemons do).

A process keeps the environment that it began with, whatever session it leads and whoever its
parent is now: a word in it finds what a worker started. Not found is what began with an
environment that user code emptied; nothing is found where there is no /proc (macOS).

Takes: the word in the environment of a worker. Gives: the number of processes ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

MARK = "TREADLE_GRADER"
"""The variable that holds the word."""

_ROUNDS = 5
"""A process may be forked while others are looked at."""


def end_marked(word: str) -> int:
    """Kill every process of this user that has the word, but not this one."""
    ended: set[int] = set()
    for _ in range(_ROUNDS):
        found = _marked(word) - ended
        if not found:
            break
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        ended |= found
    return len(ended)


def _marked(word: str) -> set[int]:
    entry = f"{MARK}={word}".encode()
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        pid = int(path.name)
        if pid != os.getpid() and entry in _environment(path).split(b"\0"):
            found.add(pid)
    return found


def _environment(path: Path) -> bytes:
    try:
        return (path / "environ").read_bytes()
    except OSError:  # of another user, or gone meanwhile
        return b""
