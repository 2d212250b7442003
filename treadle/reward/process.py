"""A worker process that leads its own session, and our ends of its pipes.

Guarantees: `end` leaves no process of its group behind and none that left the group (`strays`), no
zombie of ours and no open pipe.
`interrupt` may be called from any thread; everything else belongs to one thread, because a
closed pipe's number is soon another file's.

Takes: nothing. Gives: requests in, replies out, an exit code.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from treadle.reward.frames import Pipes
from treadle.reward.strays import MARK, end_marked

_ROOT = str(Path(__file__).resolve().parents[2])
"""Where the package is importable from, for a child that does not inherit our import path."""


class Worker:
    """A running `treadle.reward.worker`."""

    def __init__(self) -> None:
        self._word = secrets.token_hex(16)
        path = [_ROOT, *filter(None, [os.environ.get("PYTHONPATH", "")])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "treadle.reward.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path), MARK: self._word},
        )
        self._ended = False
        self._lock = threading.Lock()
        stdin, stdout, stderr = self._streams = (
            self._process.stdin,
            self._process.stdout,
            self._process.stderr,
        )
        assert stdin is not None and stdout is not None and stderr is not None
        self.pipes = Pipes(stdin.fileno(), stdout.fileno(), stderr.fileno())

    @property
    def pid(self) -> int:
        """Process id, and the id of its group and session."""
        return self._process.pid

    def interrupt(self) -> None:
        """Kill the whole group, so that the owner's wait ends. From any thread."""
        with self._lock:
            # Not reaped yet, so the number is still this group's.
            if not self._ended:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, signal.SIGKILL)

    def end(self, *, wait_s: float = 0.0) -> str:
        """Kill the group, reap the worker, close the pipes. Gives how it had ended before.

        Args:
            wait_s: How long to wait for an end of its own: pipes close a little earlier.
        """
        # Asked first: after the signal every end looks like ours.
        how, deadline = _how_it_ended(self.pid), time.monotonic() + wait_s
        while not how and time.monotonic() < deadline:
            time.sleep(0.005)
            how = _how_it_ended(self.pid)
        self.interrupt()
        with self._lock:
            self._ended = True
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=10)
        end_marked(self._word)
        self.pipes.drain()
        for stream in self._streams:
            if stream is not None:
                stream.close()
        return how or "it closed its pipes"


def _how_it_ended(pid: int) -> str:
    info = None
    # macOS has no waitid: there the end is not told, which costs only the detail.
    with contextlib.suppress(ChildProcessError, AttributeError):
        info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if info is None:
        return ""
    if info.si_code == os.CLD_EXITED:
        return f"exit code {info.si_status}"
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(info.si_status).name}"
    return f"signal {info.si_status}"
