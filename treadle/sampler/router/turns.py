"""One turn of a session: a place for it, the replica's answer, another replica when that is lost.

    place? --no--> wait --> bound --> open there --> sample --> its tokens
      ^                                 |              |
      `----------- the replica was lost, before or during it

Guarantees:
- a turn is asked of at most `attempts` replicas, each time with the same ids and the same seed, and
  what it returns was drawn by one of them;
- an error is the caller's own only if its replica answers and still knows the session;
- a session that ends while it waits, opens or is answered leaves nothing behind: what a replica
  may hold of it becomes an orphan there;
- every wait is bounded: by the deadline, by `recovery_s` while no replica serves.

Takes: sessions, prompts. Gives: Completions. Waits for: places, replicas.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from treadle.errors import SamplerError
from treadle.sampler.router.health import Health
from treadle.sampler.router.places import Handle, Places, Session, Wait
from treadle.sampler.router.terms import NoPlace, NoReplica, RouterLimits, TurnLost
from treadle.sampler.router.unison import Unison
from treadle.types import Completion, SamplingParams, StopReason


class Turns:
    """Of the sessions of one router."""

    def __init__(
        self,
        handles: Sequence[Handle],
        places: Places,
        health: Health,
        unison: Unison,
        limits: RouterLimits,
    ) -> None:
        self._handles = handles
        self._places = places
        self._health = health
        self._unison = unison
        self._limits = limits
        self.counts: Counter[str] = Counter(retried_turns=0, refused=0)

    # ------------------------------------------------------------------ a turn

    async def turn(
        self, record: Session, prompt: Sequence[int], params: SamplingParams, deadline: float
    ) -> Completion:
        """Ask the session's replica, and others when it is lost; ABORTED at the deadline.

        Raises NoReplica, TurnLost, or what a replica that answers raised.
        """
        loop = asyncio.get_running_loop()
        self._places.move_if_better(record, self._limits.move_margin)
        for attempt in range(self._limits.attempts):
            if not await self.settle(record, deadline, turn=True):
                if record.closed or loop.time() >= deadline:
                    return _aborted(prompt)
                continue
            home = record.home
            assert home is not None
            epoch, began, asked = home.epoch, loop.time(), params
            stops = self._unison.stops
            left_s = deadline - began
            if left_s < params.deadline_s - 1e-6:  # it has waited, or was asked before
                asked = replace(params, deadline_s=max(1e-3, left_s))
            self.counts["retried_turns"] += attempt > 0
            try:
                async with asyncio.timeout_at(deadline + self._limits.grace_s) as scope:
                    home.scopes.add(scope)
                    try:
                        completion = await home.replica.sample(record.alias, prompt, asked)
                    finally:
                        home.scopes.discard(scope)
            except TimeoutError:
                if home.epoch == epoch and not record.closed:
                    await self._health.look(home, certain=True)
                if record.closed or loop.time() >= deadline:
                    return _aborted(prompt)
                continue
            except SamplerError:
                if record.closed:
                    return _aborted(prompt)
                if await self._is_callers(record, home, epoch):
                    raise
                continue
            if stops == self._unison.stops:  # else its time says nothing of the replica
                self._health.clock_turn(home, loop.time() - began, len(completion.ids))
            return completion
        raise TurnLost(
            f"a turn of session `{record.name}` lost {self._limits.attempts} replicas",
            hint="do replicas die of this prompt? its length is " + str(len(prompt)),
        )

    async def _is_callers(self, record: Session, home: Handle, epoch: int) -> bool:
        """Whether an error of a turn was the request's own, and not of a lost replica."""
        if home.epoch != epoch:
            return False
        await self._health.look(home, certain=True)
        if home.epoch != epoch:
            return False
        # It answers. One that forgot the session (a restart that no check saw) takes it anew.
        try:
            async with asyncio.timeout(self._limits.call_limit_s):
                await home.replica.open(record.alias, group=record.group)
        except (SamplerError, TimeoutError):
            return True
        return False

    # ------------------------------------------------------------------ a place

    async def settle(self, record: Session, deadline: float, *, turn: bool = False) -> bool:
        """Have a place and be open on it. False = try again, closed, or a turn's deadline.

        Raises NoReplica; NoPlace at the deadline of an `open`; SamplerError when a replica that
        answers will not open it.
        """
        if record.opened:
            return True
        if record.closed:
            return False
        if record.home is None and not await self._place(record, deadline, turn=turn):
            return False
        home = record.home
        if home is None or record.closed:
            return False
        if record.moved or record.alias in home.orphans:
            record.alias = f"{record.name}~{record.moved}"
        alias, record.asked = record.alias, True
        try:
            async with asyncio.timeout(self._limits.call_limit_s):
                await home.replica.open(alias, group=record.group)
        except (SamplerError, TimeoutError) as error:
            await self._health.look(home, certain=True)
            if record.home is not home:
                return False  # lost or released meanwhile
            if isinstance(error, TimeoutError):
                self._places.leave(record)
                return False
            record.asked = False  # it refused: what it has under this name is not ours to free
            self._places.leave(record)
            raise
        except BaseException:
            if record.home is home:
                self._places.leave(record)
            raise
        if record.home is not home:
            home.orphans[alias] = None  # released or lost while it was being opened
            return False
        record.opened = True
        return True

    async def _place(self, record: Session, deadline: float, *, turn: bool) -> bool:
        """Bind to a replica, waiting for room. False = at the deadline of a turn, or closed."""
        loop = asyncio.get_running_loop()
        ahead = bool(self._places.first) or (not turn and bool(self._places.new))
        if not ahead and self._places.bind(record):
            return True
        wait = record.wait = Wait(record)
        (self._places.first if turn else self._places.new).append(wait)
        try:
            while not wait.future.done():
                gone = self._places.gone_s
                until = min(deadline, loop.time() + self._limits.recovery_s)
                if gone is not None:
                    until = min(until, gone + self._limits.recovery_s)
                await asyncio.wait({wait.future}, timeout=max(0.0, until - loop.time()))
                if wait.future.done():
                    break
                now = loop.time()
                if (
                    self._places.gone_s is not None
                    and now - self._places.gone_s >= self._limits.recovery_s
                ):
                    self.counts["refused"] += 1
                    raise self.no_replica()
                if now >= deadline:
                    if turn:
                        return False
                    self.counts["refused"] += 1
                    raise self._no_place(record)
            wait.future.result()
            return not record.closed
        finally:
            record.wait = None
            if wait.queued:
                (self._places.first if turn else self._places.new).remove(wait)

    # ------------------------------------------------------------------ refusals

    def no_replica(self) -> NoReplica:
        behind = any(h.standing.healthy and h.behind for h in self._handles)
        return NoReplica(
            f"none of {len(self._handles)} replicas answers"
            + (" with the newest weights" if behind else ""),
            hint=f"try again later: they are looked at every {self._limits.poll_s:g} s",
        )

    def _no_place(self, record: Session) -> NoPlace:
        state = ", ".join(
            f"{h.name}: {h.sessions} of {h.cap if h.cap is not None else 'any'}"
            + ("" if h.standing.healthy else " (lost)")
            + (" (behind)" if h.standing.healthy and h.behind else "")
            + (" (held back)" if h.quarantined else "")
            for h in itertools.islice(self._handles, 8)
        )
        bound = self._places.control
        limit = "" if bound is None else f", {self._places.placed} of {bound.limit} in all"
        return NoPlace(
            f"session `{record.name}` got no place in {self._limits.open_limit_s:g} s; "
            f"{state}{limit}",
            hint="fewer rollouts at once, more replicas, or sessions that are never released?",
        )


def _aborted(prompt: Sequence[int]) -> Completion:
    return Completion(
        ids=(), logprobs=(), versions=(), stop_reason=StopReason.ABORTED, prompt_tokens=len(prompt)
    )
