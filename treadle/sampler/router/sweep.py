"""Freeing what replicas hold for nobody.

Guarantees: an orphan stays one until its replica has released it, however often that takes; no
call outlasts its bound; `settle` waits for all sweeps in progress.

Takes: handles with orphans. Gives: nothing. Waits for: replicas, bounded.
"""

from __future__ import annotations

import asyncio

from treadle.errors import SamplerError
from treadle.sampler.router.places import Handle


class Sweeper:
    """Of one router; see the module."""

    def __init__(self, call_limit_s: float) -> None:
        self._limit_s = call_limit_s
        self._sweeps: set[asyncio.Task[None]] = set()

    def soon(self, handle: Handle) -> None:
        """Sweep in the background."""
        task = asyncio.ensure_future(self.sweep(handle))
        self._sweeps.add(task)
        task.add_done_callback(self._sweeps.discard)

    async def sweep(self, handle: Handle) -> None:
        """Free all of a replica's orphans, until one cannot be freed now."""
        if handle.sweeping:
            return
        handle.sweeping = True
        try:
            for alias in list(handle.orphans):
                if not await self.free(handle, alias):
                    return
        finally:
            handle.sweeping = False

    async def free(self, handle: Handle, alias: str) -> bool:
        """Release one orphan. False = not now."""
        if not handle.standing.healthy:
            return False
        if alias not in handle.orphans:
            return True
        try:
            async with asyncio.timeout(self._limit_s):
                await handle.replica.release(alias)
        except (SamplerError, TimeoutError):
            return False
        handle.orphans.pop(alias, None)
        return True

    async def settle(self) -> None:
        if self._sweeps:
            await asyncio.wait(self._sweeps)
