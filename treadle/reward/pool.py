"""Runs graders in processes that can be killed.

Guarantees, for every call:

- it ends within its limit, counted from the start of its own work: neither the queue nor the
  start of a worker nor the building of a task set counts against it;
- what goes wrong with a grader (it raises, hangs, exits, crashes, returns no finite number) leaves
  that one trajectory *unscored*, with the cause; it is never a 0 and never ends another call;
- the caller's event loop is never blocked, no signal is used here, and any loop may call;
- a worker that is ended takes the processes it started with it, and none is left after `close`;
- a reply counts for the very call that it answers: each call has a nonce, and a worker whose frames
  do not fit is replaced.

A grader sees a copy of the trajectory, in another process: it cannot change ours. It is trusted
code, though, with the rights of this user: text of a model that it *executes* needs a sandbox.

Takes: a function and a trajectory. Gives: Reward.
"""

from __future__ import annotations

import asyncio
import atexit
import hashlib
import json
import os
import pickle
import queue
import secrets
import sys
import threading
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from treadle.errors import ConfigError
from treadle.reward.pickling import dump
from treadle.reward.process import Worker
from treadle.reward.values import failed, reward_of
from treadle.types import Reward, Trajectory

SETUP_LIMIT_S = 120.0
"""For starting a worker, importing a grader's module and building its task set."""

MAX_PICKLES = 64


@dataclass(slots=True)
class _Call:
    fn: Callable[..., Any]
    name: str
    trajectory: Trajectory
    limit_s: float
    outcome: Future[Reward] = field(default_factory=Future)


class GraderPool:
    """Killable grading workers, started when the first call comes.

    Use it as a context manager, or call `close`. Safe to share between threads and event loops.
    """

    def __init__(self, workers: int = 2) -> None:
        """Args: workers: processes; each grades one trajectory at a time."""
        if workers < 1:
            raise ConfigError(f"a grader pool needs at least 1 worker, got {workers}")
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._slots = [_Slot() for _ in range(workers)]
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False
        _open_pools.add(self)

    async def score(self, fn: Callable[..., Any], trajectory: Trajectory, limit_s: float) -> Reward:
        """Grade one trajectory.

        Args:
            fn: Takes the Trajectory; gives a finite number, or a mapping of named numbers:
                "reward", else "score", is the value, and the others become `parts`. May be
                async. Pickled when first seen, by import path where it has one: state that it
                changes later in this process is not seen.
            trajectory: What is graded; copied.
            limit_s: Seconds that `fn` may run.

        Returns:
            The reward. Never raises for what `fn` does: `value` is then None, with the error.
        """
        return await asyncio.wrap_future(self._submit(fn, trajectory, limit_s))

    def score_sync(self, fn: Callable[..., Any], trajectory: Trajectory, limit_s: float) -> Reward:
        """As `score`, for callers without an event loop."""
        return self._submit(fn, trajectory, limit_s).result()

    @property
    def stats(self) -> dict[str, int]:
        """Counts so far: calls, unscored, timeouts, crashes, workers_started."""
        total: Counter[str] = Counter()
        for slot in self._slots:
            total.update(slot.stats)
        return dict(total)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers now alive; each leads a process group of its own."""
        workers = [slot.worker for slot in self._slots]
        return tuple(w.pid for w in workers if w is not None)

    def close(self) -> None:
        """End all workers and what they started; calls not done become unscored. Idempotent."""
        with self._lock:
            self._closed = True
            threads, self._threads = self._threads, []
        for _ in threads:
            self._calls.put(None)
        for slot in self._slots:
            slot.stop()
        for thread in threads:
            thread.join(timeout=10)
        while True:
            try:
                call = self._calls.get_nowait()
            except queue.Empty:
                break
            if call is not None:
                _finish(call, _closed(call))

    def __enter__(self) -> GraderPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _submit(
        self, fn: Callable[..., Any], trajectory: Trajectory, limit_s: float
    ) -> Future[Reward]:
        if limit_s <= 0:
            raise ConfigError(f"the limit of a grading call must be > 0 s, got {limit_s}")
        call = _Call(fn, name_of(fn), trajectory, limit_s)
        with self._lock:
            if self._closed:
                call.outcome.set_result(_closed(call))
                return call.outcome
            while len(self._threads) < len(self._slots):
                slot = self._slots[len(self._threads)]
                thread = threading.Thread(
                    target=slot.work, args=(self._calls,), name="grader", daemon=True
                )
                thread.start()
                self._threads.append(thread)
            self._calls.put(call)
        return call.outcome


_open_pools: weakref.WeakSet[GraderPool] = weakref.WeakSet()


@atexit.register
def _close_pools() -> None:
    for pool in list(_open_pools):
        pool.close()


class _Slot:
    """One thread and the worker it owns: takes calls from the queue until told to stop."""

    def __init__(self) -> None:
        self.worker: Worker | None = None
        self.stats: Counter[str] = Counter()
        self._pickles: OrderedDict[int, tuple[Any, bytes, bytes]] = OrderedDict()
        self._stopping = False
        self._lock = threading.Lock()

    def work(self, calls: queue.SimpleQueue[_Call | None]) -> None:
        while (call := calls.get()) is not None:
            if not call.outcome.set_running_or_notify_cancel():
                continue
            try:
                reward = self._grade(call)
            except Exception as error:
                # A fault of ours, not of the grader; still this call's alone.
                self._discard()
                reward = failed(call.name, f"could not be run: {error!r}", error)
            self.stats["calls"] += 1
            self.stats["unscored"] += reward.value is None
            call.outcome.set_result(reward)
        self._discard()

    def stop(self) -> None:
        """From another thread: end the call in progress and start no other."""
        with self._lock:
            self._stopping = True
            if self.worker is not None:
                self.worker.interrupt()

    def _grade(self, call: _Call) -> Reward:
        worker = self._ready_worker()
        if worker is None:
            return _closed(call)
        try:
            key, function = self._pickled(call.fn)
            trajectory = pickle.dumps(call.trajectory)
        except Exception as error:
            return failed(call.name, f"cannot be sent to a worker: {error!r}", error)
        nonce = secrets.token_hex(8)
        request = {
            "nonce": nonce,
            "key": key,
            "function": function,
            "path": [os.path.abspath(p) for p in sys.path],
            "trajectory": trajectory,
            "limit_s": call.limit_s,
        }
        started = False
        try:
            deadline = time.monotonic() + SETUP_LIMIT_S
            worker.pipes.send(pickle.dumps(request), deadline)
            reply = _reply(worker, nonce, deadline, "started", "unloaded")
            if reply["event"] == "started":
                started = True
                reply = _reply(worker, nonce, time.monotonic() + call.limit_s, "done")
        except TimeoutError:
            self._discard()
            if self._stopping:
                return _closed(call)
            self.stats["timeouts"] += 1
            limit = call.limit_s if started else SETUP_LIMIT_S
            what = "timed out after" if started else "could not be set up within"
            return failed(call.name, f"{what} {limit:g} s; its worker was ended")
        except (EOFError, OSError):
            how = self._discard(wait_s=1.0)
            if self._stopping:
                return _closed(call)
            self.stats["crashes"] += 1
            printed = worker.pipes.printed[-300:]
            return failed(
                call.name,
                f"ended its worker ({how})",
                hint=f"the last it printed: {printed}" if printed else "",
            )
        except _Misfit as error:
            self._discard()
            if self._stopping:
                return _closed(call)
            self.stats["crashes"] += 1
            return failed(
                call.name,
                f"was answered with {error}; its worker was ended",
                hint="does a grader write to files that it did not open?",
            )
        return reward_of(call.name, reply, call.trajectory)

    def _ready_worker(self) -> Worker | None:
        with self._lock:
            if self._stopping:
                return None
            if self.worker is None:
                self.worker = Worker()
                self.stats["workers_started"] += 1
            return self.worker

    def _discard(self, *, wait_s: float = 0.0) -> str:
        """End the worker and what it started; the next call gets a new one."""
        with self._lock:
            worker, self.worker = self.worker, None
        return worker.end(wait_s=wait_s) if worker is not None else ""

    def _pickled(self, fn: Callable[..., Any]) -> tuple[bytes, bytes]:
        """(digest, pickle) of a function; kept, with the function, for its next trajectory."""
        if id(fn) not in self._pickles:
            data = dump(fn)
            self._pickles[id(fn)] = (fn, hashlib.blake2b(data, digest_size=16).digest(), data)
            if len(self._pickles) > MAX_PICKLES:
                self._pickles.popitem(last=False)
        self._pickles.move_to_end(id(fn))
        return self._pickles[id(fn)][1:]


class _Misfit(Exception):
    """A frame that is no answer to the call in progress."""


def _reply(worker: Worker, nonce: str, deadline: float, *events: str) -> dict[str, Any]:
    """The next frame. Raises _Misfit: it is of another call, or none of `events` is due."""
    frame = worker.pipes.receive(deadline)
    try:
        reply = json.loads(frame)
        sent, event = reply["nonce"], reply["event"]
    except (ValueError, RecursionError, TypeError, KeyError):
        raise _Misfit(f"{frame[:60]!r}, which is no reply") from None
    if sent != nonce:
        raise _Misfit(f"the `{event}` of another call")
    if event not in events:
        raise _Misfit(f"`{event}` where {' or '.join(f'`{e}`' for e in events)} was due")
    return reply


def name_of(fn: Callable[..., Any]) -> str:
    """What errors call a grader."""
    return getattr(fn, "name", "") or getattr(fn, "__qualname__", "") or type(fn).__name__


def _finish(call: _Call, reward: Reward) -> None:
    if call.outcome.set_running_or_notify_cancel():
        call.outcome.set_result(reward)


def _closed(call: _Call) -> Reward:
    return failed(call.name, "was not run: the grader pool is closed")
