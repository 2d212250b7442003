"""A grading process: reads a call, runs it, writes what it returned. Started by `pool.py`.

    python -m treadle.reward.worker

Guarantees: whatever user code prints cannot reach the frames (standard output is moved away
before any of it runs); what it returns goes back as JSON, so that the parent never unpickles
anything a grader made; the process ends with its parent. A process that user code forks has no
end of the frames, and ends where it comes back from user code.

Takes: pickled calls on standard input (from our own parent). Gives: JSON frames.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import math
import numbers
import os
import pickle
import queue
import resource
import signal
import sys
import threading
import traceback
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

from treadle.errors import TreadleError, said
from treadle.reward.frames import HEADER
from treadle.reward.strays import MARK, end_marked
from treadle.reward.values import FLAGGED

MAX_FUNCTIONS = 64
"""Functions kept loaded, so that what they cache (a task set) is built once."""

GRACE_S = 5
"""Past its limit the kernel ends this process, should the parent be gone and unable to."""


def main() -> None:
    """Serve calls until the parent closes the pipe."""
    replies = _Replies(os.dup(1))
    os.dup2(2, 1)
    _prefer_to_be_killed()
    _limit_memory()
    calls: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    requests = os.fdopen(os.dup(0), "rb")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)

    def detach() -> None:
        # A child that outlives this process must not keep the parent waiting for its end.
        for fd in (replies.fd, requests.fileno()):
            os.dup2(null, fd, inheritable=False)

    os.register_at_fork(after_in_child=detach)
    threading.Thread(target=_listen, args=(requests, calls), daemon=True).start()
    functions: OrderedDict[bytes, Callable[..., Any]] = OrderedDict()
    while True:
        _serve(calls.get(), functions, replies)


def _listen(requests: BinaryIO, calls: queue.SimpleQueue[dict[str, Any]]) -> None:
    """Hand over calls; when the parent is gone, end this process and its children at once."""
    while True:
        header = requests.read(HEADER.size)
        body = requests.read(HEADER.unpack(header)[0]) if len(header) == HEADER.size else b""
        if not body:
            end_marked(os.environ.get(MARK, ""))
            if os.getpgrp() == os.getpid():
                os.killpg(0, signal.SIGKILL)
            os._exit(0)
        calls.put(pickle.loads(body))


def _serve(
    call: dict[str, Any], functions: OrderedDict[bytes, Callable[..., Any]], replies: _Replies
) -> None:
    replies.nonce = call["nonce"]
    try:
        fn = _function(call, functions)
        trajectory = pickle.loads(call["trajectory"])
        # Rebuilding a task set is set-up, not grading: it has a limit of its own.
        if hasattr(fn, "prepare"):
            fn.prepare()  # type: ignore[attr-defined]
    except BaseException as error:
        replies.send("unloaded", _failure(error), raised=error)
        return
    replies.send("started", {})
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(math.ceil(call["limit_s"]) + GRACE_S)
    raised = None
    try:
        value = fn(trajectory)
        if inspect.isawaitable(value):
            value = asyncio.run(_awaited(value))
        answer = {"value": plain(value)}
    except BaseException as error:
        raised, answer = error, _failure(error)
    signal.alarm(0)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):  # user code closed it
                stream.flush()
    replies.send("done", answer, raised=raised)


def _function(
    call: dict[str, Any], functions: OrderedDict[bytes, Callable[..., Any]]
) -> Callable[..., Any]:
    key = call["key"]
    if key not in functions:
        for path in call["path"]:
            if path not in sys.path:
                sys.path.append(path)
        functions[key] = pickle.loads(call["function"])
        if len(functions) > MAX_FUNCTIONS:
            functions.popitem(last=False)
    functions.move_to_end(key)
    return functions[key]


async def _awaited(value: Any) -> Any:
    return await value


def plain(value: Any) -> Any:
    """What a reward function returned, as JSON: numbers, None, text, and mappings of them.

    Numbers of other libraries become floats; anything else becomes {"?": its description}, so
    that the parent can say what it got.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Mapping):
        return {str(k): _spans(v) if k == FLAGGED else plain(v) for k, v in value.items()}
    if isinstance(value, numbers.Real):
        return float(value)
    if hasattr(value, "item") and getattr(value, "size", None) in (1, ()):
        return plain(value.item())
    if hasattr(value, "item") and hasattr(value, "numel") and value.numel() == 1:
        return plain(value.item())
    return {"?": f"{type(value).__name__} {value!r}"[:200]}


def _spans(value: Any) -> Any:
    """(node, start, end) triples as lists of numbers; what is none stays what it was."""
    if not isinstance(value, list | tuple):
        return plain(value)
    return [
        [plain(n) for n in span] if isinstance(span, list | tuple) else plain(span)
        for span in value
    ]


def _failure(error: BaseException) -> dict[str, Any]:
    ours = isinstance(error, TreadleError)
    return {
        "raised": type(error).__name__,
        "message": error.message if isinstance(error, TreadleError) else said(error)[:1000],
        "hint": error.hint if isinstance(error, TreadleError) else _memory_hint(error),
        "cause": "" if ours else "".join(traceback.format_exception(error))[-2000:],
    }


class _Replies:
    """Our end of the frames; each carries the nonce of the call that it answers."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.nonce = ""
        self._pid = os.getpid()

    def send(
        self, event: str, message: dict[str, Any], *, raised: BaseException | None = None
    ) -> None:
        """Write a frame; a forked child, back from user code by `raised`, ends here instead."""
        if os.getpid() != self._pid:
            os._exit(_status(raised))
        body = json.dumps({"nonce": self.nonce, "event": event, **message}).encode()
        data = memoryview(HEADER.pack(len(body)) + body)
        while data:
            data = data[os.write(self.fd, data) :]


def _status(raised: BaseException | None) -> int:
    """The exit status that the interpreter would have ended with."""
    if raised is None:
        return 0
    if isinstance(raised, SystemExit):
        return raised.code & 0xFF if isinstance(raised.code, int) else int(raised.code is not None)
    with contextlib.suppress(OSError, ValueError):
        traceback.print_exception(raised)
        sys.stderr.flush()
    return 1


def _prefer_to_be_killed() -> None:
    """If grading uses up the machine's memory, the kernel should end this process, not the run."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        pass


MEMORY_SHARE = 0.5
"""Of the machine's memory: what a worker may allocate. Room that a library only reserves (as torch
does) does not count."""


def _limit_memory() -> None:
    """A grader that allocates without end gets a MemoryError, and the machine does not swap."""
    limit = int(MEMORY_SHARE * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard not in (resource.RLIM_INFINITY, -1):
        limit = min(limit, hard)
    with contextlib.suppress(OSError, ValueError):  # macOS takes no such limit
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def _memory_hint(error: BaseException) -> str:
    if not isinstance(error, MemoryError):
        return ""
    limit = resource.getrlimit(resource.RLIMIT_DATA)[0] / 2**30
    return f"a grading process may allocate {limit:.1f} GiB, {MEMORY_SHARE:.0%} of this machine's"


if __name__ == "__main__":
    main()
