"""Looking at replicas: who answers, who is under pressure, how many sessions each may have.

Guarantees: a replica that fails its checks loses its sessions and is taken back once it answers
again and is in unison with the others; one that was restarted between two checks loses them too;
every check has a bound; a fault of ours in one look does not end all looking.

Takes: handles, rules. Gives: standings, caps, the controller's state. Waits for: replicas.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

from treadle.sampler.router.places import Handle, Places, Session
from treadle.sampler.router.sweep import Sweeper
from treadle.sampler.router.terms import RouterLimits
from treadle.sampler.router.unison import Unison
from treadle.schedule import concurrency as control
from treadle.schedule.concurrency import ConcurrencySettings, Pool
from treadle.schedule.routing import Caps, Resident, Rules, check_failed, check_passed
from treadle.types import SamplerLoad

logger = logging.getLogger(__name__)

SPEED_TURNS = 5
"""Turns of a replica after which its speed is compared with the pool's."""


class Health:
    """Of the replicas of one router."""

    def __init__(
        self,
        handles: Sequence[Handle],
        places: Places,
        unison: Unison,
        sweeper: Sweeper,
        *,
        rules: Rules,
        limits: RouterLimits,
        caps: Caps | None,
        concurrency: ConcurrencySettings | None,
    ) -> None:
        self._handles = handles
        self._places = places
        self._unison = unison
        self._sweeper = sweeper
        self._rules = rules
        self._limits = limits
        self._caps = caps
        self._settings = concurrency
        self.resident = Resident()
        """Of the sessions that have ended."""
        self.counts: Counter[str] = Counter(quarantines=0, losses=0, readmissions=0)
        self.seen = dict.fromkeys(("preemptions", "prefix_query_tokens", "prefix_hit_tokens"), 0)
        """Sums of the replicas' counters; they survive a replica's restart."""

    # ------------------------------------------------------------------ one look

    async def look_at_all(self, sessions: Mapping[str, Session], *, certain: bool = False) -> None:
        """Check every replica, and decide again what it may hold.

        Args:
            sessions: all that are open, in order of age.
        """
        await asyncio.gather(*(self.look(handle, certain=certain) for handle in self._handles))
        if self._caps is not None:
            for handle in self._handles:
                if handle.load is not None:
                    handle.measured_cap = self._caps.cap(
                        handle.load.kv_tokens,
                        self.resident,
                        before=handle.measured_cap or 0.0,
                        step_s=self._limits.poll_s,
                    )
        self._control(sessions)
        self._places.wake()
        for handle in self._handles:
            if handle.standing.healthy and handle.orphans:
                self._sweeper.soon(handle)

    async def look(self, handle: Handle, *, certain: bool = False) -> None:
        """One health check; `certain` = there is another sign that the replica is lost."""
        try:
            async with asyncio.timeout(self._limits.health_s):
                load = await handle.replica.load()
        except Exception as error:  # whatever it is, it is no answer
            self._no_answer(handle, error, certain)
            return
        if handle.load is not None and handle.standing.healthy and _restarted(handle.load, load):
            logger.warning("replica %s was restarted: its sessions are lost", handle.name)
            self._lose(handle)
        self._count(handle, load)
        before = handle.standing
        after = handle.standing = check_passed(
            before,
            self._rules,
            load,
            now_s=asyncio.get_running_loop().time(),
            slowness=self._slowness(handle),
        )
        if after.quarantined and not before.quarantined:
            self.counts["quarantines"] += 1
            logger.warning("replica %s is held back: %s", handle.name, load)
        if before.quarantined and not after.quarantined:
            handle.speed_turns = 0
        if not after.healthy:
            return
        if not before.healthy:
            logger.warning("replica %s answers again", handle.name)
            if not handle.behind:
                self.counts["readmissions"] += 1
                self._places.admit()
        self._unison.look(handle)

    def _no_answer(self, handle: Handle, error: Exception, certain: bool) -> None:
        was = handle.standing.healthy
        handle.standing = check_failed(handle.standing, self._rules, certain=certain)
        if was and not handle.standing.healthy:
            logger.warning("replica %s is lost: %s", handle.name, error or "no answer")
            self.counts["losses"] += 1
            self._lose(handle)

    def _lose(self, handle: Handle) -> None:
        self._unison.lost(handle)
        self._places.lose(handle)

    def _count(self, handle: Handle, load: SamplerLoad) -> None:
        """Keep what the replica said of itself, beside what is known of it."""
        for counter in self.seen:
            last, value = getattr(handle.load, counter, 0), getattr(load, counter)
            self.seen[counter] += value - last if value >= last else value
        handle.load = load
        ours = len(handle.orphans) + sum(record.asked for record in handle.members.values())
        strangers, handle.strangers = handle.strangers, max(0, load.sessions - ours)
        handle.others = min(strangers, handle.strangers)  # a difference of a moment is no stranger

    # ------------------------------------------------------------------ speed

    def clock_turn(self, handle: Handle, seconds: float, tokens: int) -> None:
        """A turn of so many tokens took so long there."""
        if not tokens:
            return
        handle.speed_turns += 1
        weight = max(0.1, 1 / handle.speed_turns)
        handle.speed_s += weight * (seconds / tokens - handle.speed_s)

    def _slowness(self, handle: Handle) -> float | None:
        """Of its recent turns, over the median of the others; None = too few to say."""
        others = [
            h.speed_s
            for h in self._handles
            if h is not handle and h.healthy and h.speed_turns >= SPEED_TURNS
        ]
        if handle.speed_turns < SPEED_TURNS or not others:
            return None
        return handle.speed_s / max(1e-9, statistics.median(others))

    # ------------------------------------------------------------------ how many

    def _control(self, sessions: Mapping[str, Session]) -> None:
        """One step of the concurrency controller."""
        if self._settings is None:
            return
        fit = [h for h in self._handles if h.healthy and not h.quarantined and h.load is not None]
        pool = Pool(
            now_s=asyncio.get_running_loop().time(),
            loads={h.name: h.load for h in fit if h.load is not None},
            live=self._places.placed,
            resident_tokens={
                h.name: sum(record.life.tokens for record in h.members.values()) for h in fit
            },
        )
        if self._places.control is None:
            if not fit:
                return
            self._places.control = control.begin(pool, self._settings)
        self._places.control = control.observe(self._places.control, pool, self._settings)
        if self._places.control.park:
            self._places.park(self._places.control.park, reversed(list(sessions.values())))

    def session_ended(self, record: Session) -> None:
        """Tell the controller that a session which had a place is over."""
        places = self._places
        if places.control is not None and self._settings is not None and record.opened:
            now = asyncio.get_running_loop().time()
            places.control = control.ended(
                places.control, self._settings, now_s=now, live=places.placed
            )


def _restarted(before: SamplerLoad, after: SamplerLoad) -> bool:
    """Counters that run from the start of a replica never fall."""
    return (
        after.prefix_query_tokens < before.prefix_query_tokens
        or after.preemptions < before.preemptions
    )
