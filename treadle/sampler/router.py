"""Many replicas behind one `Sampler`: a session lives on one of them until it is released.

    open -> wait for a place -> bound to a replica -> (sample)* -> release: the count falls at once
                 ^                     |  lost replica, quarantine, surplus, parked
                 +---- place again <---+

Guarantees:
- a session is bound by a pure decision of `schedule.routing` (health before affinity) and counted
  from that moment, so that a burst of opens spreads; every way out (release, expiry, a caller that
  is cancelled, a lost replica) lowers the count, and all counts end at zero;
- a prompt carries the whole history of its session, so any replica can go on with it: a turn whose
  replica is lost, before or during it, is asked again elsewhere with the same ids and the same
  seed, a bounded number of times. A token that was returned stays true, a turn is returned once;
- an idle session is moved off a replica that is over pressure or holds far more than others, at
  its next turn; counted in `moves`;
- a replica that fails its health checks loses its sessions and gets them back (new ones) once it
  answers again; no restart of anything is needed, also after all of them were lost;
- with `concurrency`, at most as many sessions have a place as the controller allows; surplus under
  hard pressure is parked: its KV is freed and its next turn waits for a place, before any new
  session does;
- every wait has a bound: a place `open_limit_s` or the turn's deadline, a call `call_limit_s`, a
  turn its deadline; a session nobody uses for `ttl_s` is released and counted in `expired`.

Belongs to one event loop. Its clock is the loop's. On a replica a session carries its own name,
with "~n" behind it after the n-th move.

Takes: replicas. Gives: a `Replica` (so routers nest). Waits for: places. Woken by: releases and
health checks.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import statistics
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType

from treadle.errors import ConfigError, SamplerError
from treadle.sampler.places import Handle, Places, Session, Wait
from treadle.schedule import concurrency as control
from treadle.schedule.concurrency import ConcurrencySettings, Pool
from treadle.schedule.routing import (
    Caps,
    LeastSessions,
    Life,
    Policy,
    Resident,
    Rules,
    check_failed,
    check_passed,
)
from treadle.types import (
    Completion,
    Replica,
    SamplerCapabilities,
    SamplerLoad,
    SamplingParams,
    StopReason,
)

logger = logging.getLogger(__name__)

REMEMBERED = 10_000
"""Names of expired sessions that are kept, to say so to a caller that comes back."""
SPEED_TURNS = 5
"""Turns of a replica after which its speed is compared with the pool's."""


class NoReplica(SamplerError):
    """No replica answers; worth another try later."""


class NoPlace(SamplerError):
    """Every replica is full or held back, for longer than the caller may wait; try later."""


class SessionUnknown(SamplerError):
    """The session was never opened, or was released."""


class SessionExpired(SessionUnknown):
    """The session was idle for longer than its time to live and has been released."""


class TurnLost(SamplerError):
    """A turn lost its replica more often than it may be asked again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterLimits:
    """Bounds and periods. Seconds."""

    poll_s: float = 5.0
    """Between two health checks of every replica."""
    health_s: float = 5.0
    """A health check without an answer after this has failed."""
    call_limit_s: float = 30.0
    """Longest `open` or `release` of a replica."""
    open_limit_s: float = 600.0
    """Longest wait of `open` for a place."""
    recovery_s: float = 30.0
    """Longest wait for a replica to come back while none answers."""
    grace_s: float = 5.0
    """A replica that has not ended a turn this long after its deadline has failed a check."""
    score_limit_s: float = 600.0
    """Longest `score` of a replica."""
    ttl_s: float = 3600.0
    """A session without a turn for this long is released."""
    attempts: int = 4
    """Replicas that one turn is asked of before it counts as lost."""
    move_margin: int | None = 4
    """Surplus of sessions at which an idle one moves; None = only off a quarantined replica."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterStats:
    """What the router is doing; counters run from its start."""

    sessions: int
    """Open sessions, placed or not."""
    placed: int
    parked: int
    waiting: int
    """Calls that wait for a place."""
    turns: int
    """Turns in flight, and scores."""
    limit: int | None
    """Sessions that the controller lets have a place; None without a controller."""
    per_replica: Mapping[str, int]
    """Live sessions."""
    healthy: int
    quarantined: int
    orphans: int
    """Sessions that a replica may still hold although nobody wants them."""
    opened: int
    released: int
    expired: int
    completed: int
    """Turns returned."""
    moves: int
    """Sessions moved while idle, off pressure or surplus."""
    parks: int
    failovers: int
    """Sessions that lost their replica."""
    retried_turns: int
    """Turns asked again after their replica was lost."""
    quarantines: int
    losses: int
    """Replicas lost."""
    readmissions: int
    refused: int
    """Calls ended by NoReplica or NoPlace."""


class Router:
    """A `Replica` over replicas. Use it as an async context manager, or `start` and `close` it."""

    def __init__(
        self,
        replicas: Mapping[str, Replica],
        *,
        policy: Policy = LeastSessions(),
        caps: Caps | None = None,
        concurrency: ConcurrencySettings | None = None,
        rules: Rules = Rules(),
        quarantine: bool = True,
        limits: RouterLimits = RouterLimits(),
    ) -> None:
        """
        Args:
            replicas: by name; at least one.
            policy: which of the replicas with room gets a session.
            caps: how many sessions a replica may hold, from its KV; None = no cap.
            concurrency: how many sessions may have a place in all; None = no bound.
            rules: when a replica is held back, lost and taken back.
            quarantine: False = pressure and slowness hold nothing back (health still does).
            limits: bounds of every wait.
        """
        if not replicas:
            raise ConfigError("a router needs at least one replica")
        self._handles = [
            Handle(name, replica, rules.probation) for name, replica in replicas.items()
        ]
        self._places = Places(self._handles, policy, free=self._sweep_soon)
        self._caps = caps
        self._settings = concurrency
        never = float("inf")
        self._rules = (
            rules
            if quarantine
            else replace(rules, kv_enter=never, queue_frac=never, slow_factor=never)
        )
        self._limits = limits
        self._resident = Resident()
        self._sessions: dict[str, Session] = {}
        self._expired: OrderedDict[str, None] = OrderedDict()
        self._seen = dict.fromkeys(("preemptions", "prefix_query_tokens", "prefix_hit_tokens"), 0)
        """Sums of the replicas' counters; they survive a replica's restart."""
        self._poller: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[None]] = set()
        """Sweeps that nobody waits for."""
        self._closed = False
        self._gone_s: float | None = None
        """Clock since which no replica answers."""
        self._counts = dict.fromkeys(
            ("opened", "released", "expired", "completed", "failovers",
             "retried_turns", "quarantines", "losses", "readmissions", "refused"), 0)  # fmt: skip

    # ------------------------------------------------------------------ life

    async def start(self) -> Router:
        """Look at every replica once and begin to serve; replicas that do not answer are lost."""
        if self._poller is not None or self._closed:
            raise SamplerError("the router was started before", hint="make a new Router")
        await self._poll(certain=True)
        self._poller = asyncio.ensure_future(self._poll_forever())
        return self

    async def close(self) -> None:
        """Release every session; calls that wait for a place raise SamplerError. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._poller is not None:
            self._poller.cancel()
            await asyncio.wait({self._poller})
        for wait in [*self._places.first, *self._places.new]:
            wait.end(SamplerError("the router was closed"))
        for session in list(self._sessions.values()):
            self._end(session)
        if self._background:
            await asyncio.wait(self._background)
        await asyncio.gather(*(self._sweep(handle) for handle in self._handles))

    async def __aenter__(self) -> Router:
        return await self.start()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    # ------------------------------------------------------------------ Replica

    @property
    def version(self) -> int:
        """The oldest that any answering replica serves."""
        serving = [h for h in self._handles if h.healthy] or self._handles
        return min(handle.replica.version for handle in serving)

    @property
    def capabilities(self) -> SamplerCapabilities:
        """What every replica can do."""
        all_of = [handle.replica.capabilities for handle in self._handles]
        return SamplerCapabilities(
            release=all(c.release for c in all_of),
            score=all(c.score for c in all_of),
            shared_prefix=all(c.shared_prefix for c in all_of),
            entropies=all(c.entropies for c in all_of),
        )

    async def open(self, session: str, *, group: str = "") -> None:
        """Wait for a place and open the session there.

        Raises NoPlace or NoReplica when there is none in time, SamplerError when the name is
        taken or the replica refuses.
        """
        self._check_running()
        if session in self._sessions:
            raise SamplerError(
                f"session `{session}` is already open", hint="names are unique until release"
            )
        loop = asyncio.get_running_loop()
        record = self._sessions[session] = Session(session, group, loop.time())
        self._expired.pop(session, None)
        record.busy = True
        try:
            deadline = loop.time() + self._limits.open_limit_s
            for _ in range(self._limits.attempts):
                if await self._settle(record, deadline) or record.closed:
                    break
            if record.closed:
                raise SessionUnknown(f"session `{session}` was released while it was opened")
            if not record.opened:
                raise NoReplica(
                    f"session `{session}` lost {self._limits.attempts} replicas while opening"
                )
        except BaseException:
            self._end(record)
            raise
        record.busy = False
        record.used_s = loop.time()
        record.life = Life(since_s=record.used_s)  # the wait for a place is no part of it
        self._counts["opened"] += 1

    async def sample(
        self, session: str, prompt: Sequence[int], params: SamplingParams
    ) -> Completion:
        """See `Sampler`; a lost replica is not the caller's concern.

        Raises SessionUnknown, SessionExpired, NoReplica, TurnLost, or what the replica raised.
        """
        record = self._known(session)
        if record.busy:
            raise SamplerError(f"session `{session}` is in the middle of a turn")
        loop = asyncio.get_running_loop()
        deadline = loop.time() + params.deadline_s
        record.busy = True
        record.life = record.life.grown(len(prompt), now_s=loop.time())
        try:
            completion = await self._turn(record, prompt, params, deadline)
        finally:
            record.busy = False
            record.used_s = loop.time()
            self._places.park_if_due(record)
        record.life = record.life.grown(len(prompt) + len(completion.ids), now_s=loop.time())
        self._counts["completed"] += 1
        return completion

    async def score(
        self, ids: Sequence[int], start: int, *, temperature: float = 1.0
    ) -> tuple[float, ...]:
        """By the replica with the fewest turns; another one when that is lost."""
        self._check_running()
        for _ in range(self._limits.attempts):
            healthy = [handle for handle in self._handles if handle.healthy]
            if not healthy:
                break
            handle = min(healthy, key=lambda h: len(h.scopes))
            epoch = handle.epoch
            try:
                async with asyncio.timeout(self._limits.score_limit_s) as scope:
                    handle.scopes.add(scope)
                    try:
                        return await handle.replica.score(ids, start, temperature=temperature)
                    finally:
                        handle.scopes.discard(scope)
            except (SamplerError, TimeoutError):
                if handle.epoch != epoch:
                    continue
                await self._check(handle, certain=True)
                if handle.healthy and handle.epoch == epoch:
                    raise
        raise self._no_replica()

    async def release(self, session: str) -> None:
        """End a session; its place is free when this is called, its KV when it returns.

        Idempotent. A turn in flight ends ABORTED. A replica that cannot free it now is asked
        again at every health check.
        """
        record = self._sessions.get(session)
        if record is None:
            return
        self._counts["released"] += 1
        if record.life.tokens:
            now = asyncio.get_running_loop().time()
            whole = record.life.grown(record.life.tokens, now_s=now)
            self._resident = self._resident.observe(whole)
        home, alias = record.home, record.alias
        self._end(record)
        if home is not None:
            await self._free(home, alias)

    async def load(self) -> SamplerLoad:
        """Of all replicas that answered the last health check, as one."""
        loads = [h.load for h in self._handles if h.healthy and h.load is not None]
        if not loads:
            raise self._no_replica()
        kv_tokens = sum(load.kv_tokens for load in loads)
        return SamplerLoad(
            running=sum(load.running for load in loads),
            waiting=sum(load.waiting for load in loads) + self._places.waiting,
            waiting_for_kv=sum(load.waiting_for_kv for load in loads),
            sessions=len(self._sessions),
            kv_usage=sum(load.kv_usage * load.kv_tokens for load in loads) / max(1, kv_tokens),
            kv_tokens=kv_tokens,
            preemptions=self._seen["preemptions"],
            prefix_query_tokens=self._seen["prefix_query_tokens"],
            prefix_hit_tokens=self._seen["prefix_hit_tokens"],
        )

    def stats(self) -> RouterStats:
        return RouterStats(
            sessions=len(self._sessions),
            placed=self._places.placed,
            parked=sum(session.parked for session in self._sessions.values()),
            waiting=self._places.waiting,
            turns=sum(len(handle.scopes) for handle in self._handles),
            limit=None if self._places.control is None else self._places.control.limit,
            per_replica={handle.name: len(handle.members) for handle in self._handles},
            healthy=sum(handle.healthy for handle in self._handles),
            quarantined=sum(handle.quarantined for handle in self._handles),
            orphans=sum(len(handle.orphans) for handle in self._handles),
            moves=self._places.moves,
            parks=self._places.parks,
            **self._counts,
        )

    def where(self, session: str) -> str | None:
        """Name of the replica that a session lives on; None while it has none."""
        home = self._known(session).home
        return None if home is None else home.name

    # ------------------------------------------------------------------ a turn

    async def _turn(
        self, record: Session, prompt: Sequence[int], params: SamplingParams, deadline: float
    ) -> Completion:
        loop = asyncio.get_running_loop()
        self._places.move_if_better(record, self._limits.move_margin)
        for attempt in range(self._limits.attempts):
            if not await self._settle(record, deadline, turn=True):
                if record.closed or loop.time() >= deadline:
                    return _aborted(prompt)
                continue
            home = record.home
            assert home is not None
            epoch, began, asked = home.epoch, loop.time(), params
            left_s = deadline - began
            if left_s < params.deadline_s - 1e-6:  # it has waited, or was asked before
                asked = replace(params, deadline_s=max(1e-3, left_s))
            self._counts["retried_turns"] += attempt > 0
            try:
                async with asyncio.timeout_at(deadline + self._limits.grace_s) as scope:
                    home.scopes.add(scope)
                    try:
                        completion = await home.replica.sample(record.alias, prompt, asked)
                    finally:
                        home.scopes.discard(scope)
            except TimeoutError:
                if home.epoch == epoch and not record.closed:
                    await self._check(home, certain=True)
                if record.closed or loop.time() >= deadline:
                    return _aborted(prompt)
                continue
            except SamplerError:
                if record.closed:
                    return _aborted(prompt)
                if await self._is_callers(record, home, epoch):
                    raise
                continue
            self._clock_turn(home, loop.time() - began, len(completion.ids))
            return completion
        raise TurnLost(
            f"a turn of session `{record.name}` lost {self._limits.attempts} replicas",
            hint="do replicas die of this prompt? its length is " + str(len(prompt)),
        )

    async def _is_callers(self, record: Session, home: Handle, epoch: int) -> bool:
        """Whether an error of a turn was the request's own, and not of a lost replica."""
        if home.epoch != epoch:
            return False
        await self._check(home, certain=True)
        if home.epoch != epoch:
            return False
        # It answers. One that forgot the session (a restart that no check saw) takes it anew.
        try:
            async with asyncio.timeout(self._limits.call_limit_s):
                await home.replica.open(record.alias, group=record.group)
        except (SamplerError, TimeoutError):
            return True
        return False

    def _clock_turn(self, home: Handle, seconds: float, tokens: int) -> None:
        if not tokens:
            return
        home.speed_turns += 1
        weight = max(0.1, 1 / home.speed_turns)
        home.speed_s += weight * (seconds / tokens - home.speed_s)

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

    # ------------------------------------------------------------------ places

    async def _settle(self, record: Session, deadline: float, *, turn: bool = False) -> bool:
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
            await self._check(home, certain=True)
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
                gone = self._gone_s
                until = min(deadline, loop.time() + self._limits.recovery_s)
                if gone is not None:
                    until = min(until, gone + self._limits.recovery_s)
                await asyncio.wait({wait.future}, timeout=max(0.0, until - loop.time()))
                if wait.future.done():
                    break
                now = loop.time()
                if self._gone_s is not None and now - self._gone_s >= self._limits.recovery_s:
                    self._counts["refused"] += 1
                    raise self._no_replica()
                if now >= deadline:
                    if turn:
                        return False
                    self._counts["refused"] += 1
                    raise self._no_place(record)
            wait.future.result()
            return not record.closed
        finally:
            record.wait = None
            if wait.queued:
                (self._places.first if turn else self._places.new).remove(wait)

    def _end(self, record: Session) -> None:
        """The session is over, whatever it was doing."""
        record.closed = True
        if self._sessions.get(record.name) is record:
            del self._sessions[record.name]
        places = self._places
        if places.control is not None and self._settings is not None and record.opened:
            now = asyncio.get_running_loop().time()
            places.control = control.ended(
                places.control, self._settings, now_s=now, live=places.placed
            )
        if record.home is not None:
            self._places.leave(record)
        if record.wait is not None:
            record.wait.end()

    # ------------------------------------------------------------------ replicas

    async def _poll_forever(self) -> None:
        while True:
            await asyncio.sleep(self._limits.poll_s)
            try:
                await self._poll()
            except Exception:  # a fault of ours in one look must not end all looking
                logger.exception("a health check failed by itself")

    async def _poll(self, *, certain: bool = False) -> None:
        await asyncio.gather(*(self._check(handle, certain=certain) for handle in self._handles))
        self._expire()
        if self._caps is not None:
            for handle in self._handles:
                if handle.load is not None:
                    handle.measured_cap = self._caps.cap(
                        handle.load.kv_tokens,
                        self._resident,
                        before=handle.measured_cap or 0.0,
                        step_s=self._limits.poll_s,
                    )
        self._control()
        self._places.wake()
        for handle in self._handles:
            if handle.healthy and handle.orphans:
                self._sweep_soon(handle)

    async def _check(self, handle: Handle, *, certain: bool = False) -> None:
        """One health check; `certain` = there is another sign that the replica is lost."""
        try:
            async with asyncio.timeout(self._limits.health_s):
                load = await handle.replica.load()
        except Exception as error:  # whatever it is, it is no answer
            was = handle.healthy
            handle.standing = check_failed(handle.standing, self._rules, certain=certain)
            if was and not handle.healthy:
                logger.warning("replica %s is lost: %s", handle.name, error or "no answer")
                self._counts["losses"] += 1
                self._lose(handle)
            return
        if handle.load is not None and handle.healthy and _restarted(handle.load, load):
            logger.warning("replica %s was restarted: its sessions are lost", handle.name)
            self._lose(handle)
        for counter in self._seen:
            last, value = getattr(handle.load, counter, 0), getattr(load, counter)
            self._seen[counter] += value - last if value >= last else value
        handle.load = load
        ours = len(handle.orphans) + sum(record.asked for record in handle.members.values())
        strangers, handle.strangers = handle.strangers, max(0, load.sessions - ours)
        handle.others = min(strangers, handle.strangers)  # a difference of a moment is no stranger
        before = handle.standing
        after = check_passed(
            before,
            self._rules,
            load,
            now_s=asyncio.get_running_loop().time(),
            slowness=self._slowness(handle),
        )
        handle.standing = after
        if after.quarantined and not before.quarantined:
            self._counts["quarantines"] += 1
            logger.warning("replica %s is held back: %s", handle.name, load)
        if before.quarantined and not after.quarantined:
            handle.speed_turns = 0
        if after.healthy and not before.healthy:
            self._counts["readmissions"] += 1
            logger.warning("replica %s answers again", handle.name)
            self._gone_s = None
            self._places.wake()

    def _lose(self, handle: Handle) -> None:
        """Its sessions have no home any more; turns in flight there are asked again elsewhere."""
        handle.epoch += 1
        handle.speed_turns = 0
        handle.others = 0
        now = asyncio.get_running_loop().time()
        if not any(h.healthy for h in self._handles) and self._gone_s is None:
            self._gone_s = now
        for record in list(handle.members.values()):
            handle.unbind(record)
            self._places.placed -= 1
            self._counts["failovers"] += 1
        for scope in handle.scopes:
            if not scope.expired():
                scope.reschedule(now)
        self._places.wake()

    def _control(self) -> None:
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
            self._places.park(self._places.control.park, reversed(self._sessions.values()))

    def _sweep_soon(self, handle: Handle) -> None:
        task = asyncio.ensure_future(self._sweep(handle))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _sweep(self, handle: Handle) -> None:
        """Free what a replica holds for nobody; what it cannot free now stays an orphan."""
        if handle.sweeping:
            return
        handle.sweeping = True
        try:
            for alias in list(handle.orphans):
                if not await self._free(handle, alias):
                    return
        finally:
            handle.sweeping = False

    async def _free(self, handle: Handle, alias: str) -> bool:
        """Release one orphan. False = not now."""
        if not handle.healthy:
            return False
        if alias not in handle.orphans:
            return True
        try:
            async with asyncio.timeout(self._limits.call_limit_s):
                await handle.replica.release(alias)
        except (SamplerError, TimeoutError):
            return False
        handle.orphans.pop(alias, None)
        return True

    def _expire(self) -> None:
        now = asyncio.get_running_loop().time()
        limit = now - self._limits.ttl_s
        late = [r for r in self._sessions.values() if r.used_s <= limit and not r.busy]
        for record in late:
            self._counts["expired"] += 1
            self._end(record)
            self._expired[record.name] = None
        while len(self._expired) > REMEMBERED:
            self._expired.popitem(last=False)
        if late:
            logger.warning(
                "%d sessions expired, the first of them %s: no turn for %g s",
                len(late),
                late[0].name,
                now - late[0].used_s,
            )

    # ------------------------------------------------------------------ refusals

    def _check_running(self) -> None:
        if self._closed or self._poller is None:
            state = "was closed" if self._closed else "is not running"
            raise SamplerError(f"the router {state}", hint="call start(), or use `async with`")

    def _known(self, session: str) -> Session:
        record = self._sessions.get(session)
        if record is not None:
            return record
        if session in self._expired:
            raise SessionExpired(
                f"session `{session}` had no turn for {self._limits.ttl_s:g} s and was released",
                hint="open it again: its history is in its next prompt",
            )
        self._check_running()
        raise SessionUnknown(f"session `{session}` is not open", hint="open() it, once")

    def _no_replica(self) -> NoReplica:
        return NoReplica(
            f"none of {len(self._handles)} replicas answers",
            hint=f"try again later: they are looked at every {self._limits.poll_s:g} s",
        )

    def _no_place(self, record: Session) -> NoPlace:
        state = ", ".join(
            f"{h.name}: {h.sessions} of {h.cap if h.cap is not None else 'any'}"
            + ("" if h.healthy else " (lost)")
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


def _restarted(before: SamplerLoad, after: SamplerLoad) -> bool:
    """Counters that run from the start of a replica never fall."""
    return (
        after.prefix_query_tokens < before.prefix_query_tokens
        or after.preemptions < before.preemptions
    )


def _aborted(prompt: Sequence[int]) -> Completion:
    return Completion(
        ids=(), logprobs=(), versions=(), stop_reason=StopReason.ABORTED, prompt_tokens=len(prompt)
    )
