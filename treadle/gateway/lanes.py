"""Lanes: the sampler's sessions that serve the turns of one session of the gateway.

Guarantees: one turn at a time on each; the lane that holds a turn's KV is taken where it is free;
a lane whose turn did not end well is released and never used again; `close` releases all, and what
cannot be released is counted as `leaked_lanes`, never waited for without a bound.

Takes: a sampler, and its session that is open already. Gives: names of open sessions. Waits for:
the sampler's `open` (the caller's bound) and `release` (RELEASE_LIMIT_S).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

from treadle.errors import SamplerError, boundary
from treadle.gateway.recorder import Recorder

log = logging.getLogger(__name__)

RELEASE_LIMIT_S = 5.0


class Lanes:
    """Of one session."""

    def __init__(self, recorder: Recorder, counts: Counter[str]) -> None:
        self._recorder = recorder
        self._counts = counts
        self._idle: list[str] = [recorder.session]
        self._all: set[str] = {recorder.session}
        self._opened = 0
        self._releasing: set[asyncio.Task[None]] = set()

    async def take(self, wanted: str) -> str:
        """A lane for one turn: `wanted` if it is free, any other, or a new one."""
        if wanted in self._idle:
            self._idle.remove(wanted)
            return wanted
        if self._idle:
            return self._idle.pop()
        self._opened += 1
        name = f"{self._recorder.session}~{self._opened}"
        with boundary(SamplerError, f"session {name}: open"):
            await self._recorder.sampler.open(name)
        self._all.add(name)
        return name

    def give_back(self, lane: str) -> None:
        """Its turn has ended well, or never began."""
        self._idle.append(lane)

    def drop(self, lane: str) -> None:
        """Its turn did not end well and may still be in the sampler: its session goes with it."""
        self._all.discard(lane)
        task = asyncio.ensure_future(self._release(lane))
        self._releasing.add(task)
        task.add_done_callback(self._releasing.discard)

    async def _release(self, lane: str) -> None:
        try:
            async with asyncio.timeout(RELEASE_LIMIT_S):
                await self._recorder.sampler.release(lane)
        except Exception as error:
            self._counts["leaked_lanes"] += 1
            log.warning("lane %s could not be released: %s", lane, error)

    async def close(self) -> None:
        """Release all of them."""
        for lane in tuple(self._all):
            self.drop(lane)
        self._idle.clear()
        if self._releasing:
            await asyncio.wait(tuple(self._releasing), timeout=2 * RELEASE_LIMIT_S)
